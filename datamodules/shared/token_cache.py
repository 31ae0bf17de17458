"""Prepared token ids on disk: memory maps with checksums, written once, safe when several processes prepare."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

FORMAT = 2
_MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class CacheEntry:
    """One prepared text: a folder that is named by what it was made from.

    Args:
        folder: where the entry is, or will be.
    """

    folder: Path

    @classmethod
    def of(cls, cache: Path, name: str, identity: Mapping[str, Any]) -> "CacheEntry":
        """The entry below `cache` of the text `name`, made from sources and settings `identity` (plain JSON data)."""
        described = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
        return cls(cache / name / hashlib.sha256(described.encode()).hexdigest()[:20])

    def prepare(self, write: Callable[[Path], None]) -> None:
        """Makes the entry with `write(folder)` unless it is there and whole; a corrupt one is made again, and warns.

        `write` fills a temporary folder that takes the entry's name only when it is complete.
        """
        if self._is_whole():
            return
        _make_folder(self.folder.parent)
        with FileLock(self.folder.with_suffix(".lock")):
            if self._is_whole():  # another process was first
                return
            if self.folder.exists():
                warnings.warn(f"{self.folder} is corrupt and is made again: {self._fault()}", stacklevel=2)
            temporary = self.folder.with_name(f".{self.folder.name}.new")
            _remove(temporary)  # of a process that was killed
            temporary.mkdir()
            try:
                write(temporary)
                _write_manifest(temporary)
                _remove(self.folder)
                os.replace(temporary, self.folder)
            finally:
                _remove(temporary)

    def exists(self) -> bool:
        """Whether the entry is there and every file has its size; the checksums are read by `prepare` alone."""
        return self._fault(checksums=False) is None

    def tokens(self, split: str) -> np.ndarray:
        """The ids of `split`, `[tokens]`, as a read-only memory map.

        Raises:
            ValueError: if the entry says that they are no integers (objects would be addresses in memory), or the file
                holds none.
        """
        index, path = self.folder / "tokens.json", self.folder / f"{split}.bin"
        try:
            dtype = json.loads(index.read_text())[split]
            kind = np.dtype(dtype).kind
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{index} says no type of ids of {split} ({error}); delete this folder") from error
        if kind not in "iu":
            raise ValueError(f"{index}: ids of {split} are {dtype!r}; delete this folder")
        try:
            return np.memmap(path, dtype=dtype, mode="r")
        except ValueError as error:
            raise ValueError(f"{path} holds no ids of type {dtype} ({error}); delete this folder") from error

    def _is_whole(self) -> bool:
        return self._fault() is None

    def _fault(self, checksums: bool = True) -> str | None:
        try:
            files = json.loads((self.folder / _MANIFEST).read_text())["files"]
            for name, (size, digest) in files.items():
                path = self.folder / name
                if path.parent != self.folder or not path.is_file():  # of a device or a pipe there is no end
                    return f"{name} is no file in it"
                if path.stat().st_size != size:
                    return f"{name} has {path.stat().st_size} bytes, {size} were written"
                if checksums and _sha256(path) != digest:
                    return f"the checksum of {name} differs"
            needed = [
                "tokens.json",
                *(f"{split}.bin" for split in json.loads((self.folder / "tokens.json").read_text())),
            ]
            if unlisted := sorted(set(needed) - set(files)):
                return f"{_MANIFEST} does not list {', '.join(unlisted)}"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def write_tokens(folder: Path, split: str, chunks: Iterable[np.ndarray], vocab_size: int) -> int:
    """Writes `chunks` of ids one after another into `folder`, 16 bits an id where that suffices; returns how many."""
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")
    count = 0
    with open(folder / f"{split}.bin", "wb") as file:
        for chunk in chunks:
            file.write(chunk.astype(dtype).tobytes())
            count += len(chunk)
    index = folder / "tokens.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    index.write_text(json.dumps({**known, split: dtype.str}))
    return count


def _write_manifest(folder: Path) -> None:
    files = {path.name: (path.stat().st_size, _sha256(path)) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))


def _remove(path: Path) -> None:
    """Remove a folder, or a file in its place; of a symbolic link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _make_folder(folder: Path) -> None:
    cure = "give a writable folder as cache_dir=... or in $ATTNSWAP_CACHE"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"prepared data cannot be written to {folder} ({error.strerror}): {cure}") from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"prepared data cannot be written to {folder} (not writable): {cure}")
