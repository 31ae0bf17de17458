"""CIFAR-10 (Krizhevsky 2009), from the hub's parquet files or the original archive."""

import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .shared.base import check_flag
from .shared.decoding import open_image
from .shared.hub import count_rows, download_parquet, find_shards, read_rows
from .shared.images import ArrayImages, in_mode, whole_labels
from .shared.paths import data_root
from .vision import VisionDataModule, split_indices

REPOSITORY = "uoft-cs/cifar10"
_ROWS = 1000
_SIZE = 32
Pixels = tuple[np.ndarray, np.ndarray]
"""(pixels `[images, 32, 32, 3]` uint8, labels `[images]` int64)"""
_PYTHON = {"train": [f"data_batch_{index}" for index in range(1, 6)], "test": ["test_batch"]}
_BINARY = {split: [f"{name}.bin" for name in names] for split, names in _PYTHON.items()}
CLASSES = 10
_MOST_BYTES = 1 << 26  # of a file, which has 31 MB in the release
_MOST_ARCHIVE = 1 << 30
_IMAGE = 3 * 32 * 32
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes in the protocol of Python 2
}


class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10, 32 x 32 pixels, ten classes, kept in memory.

    Below `root/cifar10` it takes the first that it finds of: `plain_text/{train,test}-XXXXX-of-YYYYY.parquet`, the
    layout of the hub; `cifar-10-batches-bin` or `cifar-10-binary.tar.gz`; `cifar-10-batches-py` or
    `cifar-10-python.tar.gz`, whose pickles are read by an unpickler that builds NumPy arrays and nothing else.
    Validation images are held out of train; how many there are follows from the files (50,000 / 10,000 in the
    release).

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        batch_size: images per batch and process.
        num_workers: loader processes; None for the available cores, shared by the processes that train.
        img_size: images are scaled to this where it is not 32.
        in_chans: 3, or 1 for grayscale.
        val_fraction: share of each class of the train images that is held out for validation; 0 trains on all, and
            validates on the test images.
        split_seed: draws what is held out; not the seed of the run, so that runs have the same splits.
        train_transform, eval_transform: see :class:`.VisionDataModule`; by default crops of
            60% to 100% of the image, and mirror images, which a `train_transform` of yours replaces. Images are not
            cropped in evaluation, unless `crop_pct` is given.
        download: fetch missing parquet files from the hub into `root`; otherwise they are an error.

    Raises:
        ValueError: `val_fraction` is not in [0, 1), and as :class:`.VisionDataModule`.
        NotADirectoryError: `root` is a file.

    Example:
        >>> from attnswap.datamodules import CIFAR10DataModule
        >>> data = CIFAR10DataModule(root="/data", img_size=32)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        batch_size: int = 128,
        num_workers: int | None = None,
        img_size: int = 32,
        in_chans: int = 3,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        train_transform: dict[str, Any] | None = None,
        eval_transform: dict[str, Any] | None = None,
        download: bool = False,
    ) -> None:
        if train_transform is None:
            train_transform = {"scale": [0.6, 1.0], "color_jitter": 0.0, "interpolation": "bicubic"}
        eval_transform = {"crop_pct": 1.0, **(eval_transform or {})}
        super().__init__(batch_size, num_workers, img_size, in_chans, train_transform, eval_transform)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction!r}: give a number of at least 0 and below 1")
        self.val_fraction, self.split_seed, self.download = val_fraction, split_seed, check_flag("download", download)
        self.folder = data_root(root) / "cifar10"
        self._read: dict[str, Pixels] = {}

    def prepare_data(self) -> None:
        """Downloads where that was asked for and nothing is there."""
        parquet = self.folder / "plain_text"
        if self.download and find_archive(self.folder) is None and not find_shards(parquet, "train"):
            download_parquet(REPOSITORY, "plain_text", parquet, ("train", "test"))

    def load(self, split: str) -> ArrayImages:
        if split == "test" or (split == "validation" and not self.val_fraction):
            return ArrayImages(*self._release("test"))
        pixels, labels = self._release("train")
        if not self.val_fraction:
            return ArrayImages(pixels, labels)
        train, validation = split_indices(labels, self.val_fraction, self.split_seed)
        chosen = train if split == "train" else validation
        return ArrayImages(pixels[chosen], labels[chosen])

    def _release(self, split: str) -> Pixels:
        """The images of the release's "train" or "test"."""
        if split not in self._read:
            shards = find_shards(self.folder / "plain_text", split)
            archive = find_archive(self.folder)
            if shards:
                self._read[split] = read_parquet(shards, f"CIFAR-10: {split}")
            elif archive is not None:
                self._read[split] = read_archive(archive, split)
            else:
                raise FileNotFoundError(
                    f"{self.folder / 'plain_text' / f'{split}-00000-of-00001.parquet'} is missing. Put it there from "
                    f"https://huggingface.co/datasets/{REPOSITORY}/tree/main/plain_text, or cifar-10-binary.tar.gz "
                    f"from https://www.cs.toronto.edu/~kriz/cifar.html into {self.folder}; name another folder as "
                    "root=... or in $ATTNSWAP_DATA, or set download=True"
                )
        return self._read[split]


def read_parquet(files: list[Path], description: str) -> Pixels:
    """Decodes the images of parquet files; those that cannot be read are left out, and counted in a warning.

    Raises:
        ValueError: an image is not 32 x 32, or its label is none of 0 to 9; or none can be read.
    """
    pixels, labels, damaged = [], [], []
    with tqdm(total=sum(map(count_rows, files)), desc=description, unit=" images", disable=None) as bar:
        for file in files:
            for rows in read_rows(file, ["img", "label"], _ROWS):
                for row in rows:
                    cell = {} if row["img"] is None else row["img"]
                    if not isinstance(cell, dict):
                        raise ValueError(f"{file} has {type(cell).__name__} in 'img': bytes and path are needed")
                    place = f"{file.name}, {cell.get('path') or f'image {bar.n}'}"
                    bar.update()
                    try:
                        with open_image(BytesIO(cell["bytes"])) as image:
                            size = image.size[::-1]
                            decoded = np.asarray(in_mode(image, "RGB")) if size == (_SIZE, _SIZE) else None
                    except Exception:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
                        damaged.append(place)
                        continue
                    if decoded is None:
                        raise ValueError(f"{place}: {size} pixels, where CIFAR-10 has {_SIZE} x {_SIZE}")
                    if type(row["label"]) is not int or not 0 <= row["label"] < CLASSES:  # True is an int, and no class
                        raise ValueError(
                            f"{place}: the label is {row['label']!r}, where CIFAR-10 has integers from 0 to "
                            f"{CLASSES - 1}"
                        )
                    pixels.append(decoded)
                    labels.append(row["label"])
    if not pixels:
        raise ValueError(f"none of the {len(damaged)} images of {files[0]} can be read: put an intact copy there")
    if damaged:
        warnings.warn(
            f"{description}: {len(damaged):,} of {len(damaged) + len(pixels):,} images cannot be read and are left "
            f"out: {'; '.join(damaged[:3])}",
            stacklevel=2,
        )
    return np.stack(pixels), np.array(labels)


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
    """All images of "train" or "test".

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
    if len(content) % (1 + _IMAGE):
        raise ValueError(f"{len(content):,} bytes are no multiple of {1 + _IMAGE:,}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _IMAGE)
    return _pixels(rows[:, 1:], whole_labels(rows[:, 0]))


def parse_python(content: bytes) -> Pixels:
    """A pickled dict with b"data" `[images, 3072]` uint8 and b"labels"."""
    batch = _PlainUnpickler(BytesIO(content), encoding="bytes").load()
    data, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), _IMAGE):
        raise ValueError(f"b'data' is no uint8 array of {len(labels)} x {_IMAGE}")
    return _pixels(data, whole_labels(labels))


def _pixels(rows: np.ndarray, labels: np.ndarray) -> Pixels:
    if len(labels) and not 0 <= labels.min() <= labels.max() < CLASSES:
        wrong = int(np.flatnonzero((labels < 0) | (labels >= CLASSES))[0])
        raise ValueError(f"image {wrong} has label {labels[wrong]}: labels must lie in 0 to {CLASSES - 1}")
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
