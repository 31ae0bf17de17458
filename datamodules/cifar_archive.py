"""The original CIFAR-10 archives: the binary one, and the Python one without the code that a pickle can hold."""

import pickle
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from datamodules.images import whole_labels

Pixels = tuple[np.ndarray, np.ndarray]
"""(pixels `[pictures, 32, 32, 3]` uint8, labels `[pictures]` int64)"""

_PYTHON = {"train": [f"data_batch_{index}" for index in range(1, 6)], "test": ["test_batch"]}
_BINARY = {split: [f"{name}.bin" for name in names] for split, names in _PYTHON.items()}
CLASSES = 10
_MOST_BYTES = 1 << 26  # of a file, which has 31 MB in the release
_MOST_ARCHIVE = 1 << 30
_PICTURE = 3 * 32 * 32
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes in the protocol of Python 2
}


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, bytes and NumPy arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed: only NumPy arrays are")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def find_archive(folder: Path) -> Path | None:
    """The archive in `folder`, unpacked or not, the binary one first; None where there is none."""
    names = ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-batches-py", "cifar-10-python.tar.gz")
    return next((folder / name for name in names if (folder / name).exists()), None)


def read_archive(archive: Path, split: str) -> Pixels:
    """All pictures of "train" or "test".

    Raises:
        FileNotFoundError: a file of the archive is missing.
        ValueError: a file is damaged, or holds something else than CIFAR-10.
    """
    binary = "bin" in archive.name
    parts = []
    with _opened(archive) as read:
        for name in tqdm((_BINARY if binary else _PYTHON)[split], desc=f"CIFAR-10: {split}", disable=None):
            content = read(name)
            try:
                parts.append(parse_binary(content) if binary else parse_python(content))
            except Exception as error:  # a pickle of anybody's can fail in any way
                raise ValueError(f"{archive}: {name} is no whole file of CIFAR-10 ({error})") from error
    return np.concatenate([pixels for pixels, _ in parts]), np.concatenate([labels for _, labels in parts])


def parse_binary(content: bytes) -> Pixels:
    """Rows of one byte with the label and 3,072 with the pixels, channel by channel."""
    if len(content) % (1 + _PICTURE):
        raise ValueError(f"{len(content):,} bytes are no multiple of {1 + _PICTURE:,}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PICTURE)
    return _pixels(rows[:, 1:], whole_labels(rows[:, 0]))


def parse_python(content: bytes) -> Pixels:
    """A pickled dict with b"data" `[pictures, 3072]` uint8 and b"labels"."""
    batch = _PlainUnpickler(BytesIO(content), encoding="bytes").load()
    data, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), _PICTURE):
        raise ValueError(f"b'data' is no uint8 array of {len(labels)} x {_PICTURE}")
    return _pixels(data, whole_labels(labels))


def _pixels(rows: np.ndarray, labels: np.ndarray) -> Pixels:
    if len(labels) and not 0 <= labels.min() <= labels.max() < CLASSES:
        wrong = int(np.flatnonzero((labels < 0) | (labels >= CLASSES))[0])
        raise ValueError(f"picture {wrong} has label {labels[wrong]}: labels must lie in 0 to {CLASSES - 1}")
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def _opened(archive: Path) -> AbstractContextManager[Callable[[str], bytes]]:
    return _Folder(archive) if archive.is_dir() else _Tar(archive)


def _check_size(path: Path, size: int) -> None:
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, and a file of CIFAR-10 at most {_MOST_BYTES:,}")


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Callable[[str], bytes]:
        return self._read

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file")
        _check_size(path, path.stat().st_size)
        return path.read_bytes()

    def __exit__(self, *error: object) -> None:
        return None


class _Tar:
    """Reads single files of a tar archive into memory; nothing is unpacked to disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Callable[[str], bytes]:
        try:
            self._archive = tarfile.open(self.path)
            self._members = {}
            for member in self._archive:
                if self._archive.offset > _MOST_ARCHIVE:  # where the next one begins: nothing is decompressed yet
                    raise tarfile.ReadError(f"it unpacks to more than {_MOST_ARCHIVE:,} bytes")
                if member.isfile():
                    self._members[Path(member.name).name] = member
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{self.path} is no whole tar archive ({error})") from error
        return self._read

    def _read(self, name: str) -> bytes:
        if name not in self._members:
            raise FileNotFoundError(f"{self.path} has no {name}")
        _check_size(self.path / name, self._members[name].size)
        file = self._archive.extractfile(self._members[name])
        if file is None:
            raise FileNotFoundError(f"{self.path} has no {name}")
        with closing(file):
            return file.read()

    def __exit__(self, *error: object) -> None:
        self._archive.close()
