"""Language modeling on the source files of Python's own standard library: text that is on every machine."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from .shared.base import check_at_least
from .text import TextDataModule

_LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_SPLIT_OF_TENTH = {0: "validation", 5: "test"}


class PythonSourceDataModule(TextDataModule):
    """Lines of Python: of every ten files one is for validation and one for test, none is in two splits.

    Files are ordered by the hash of their name below the folder and taken until `max_bytes`; a line is split into its
    indentation, names, numbers and single signs.

    Args:
        num_tokens: T, tokens per window.
        batch_size: windows a batch and process.
        vocab_size: the most ids, `<unk>` and `<eos>` included; None for all.
        num_workers: loader processes.
        max_bytes: the most bytes of source to read.
        folder: where the files are; None for the standard library.
        cache_dir: folder for prepared ids; None for `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        ValueError: a number is below its limit.
        NotADirectoryError: `folder` or `cache_dir` is no folder.

    Example:
        >>> from attnswap.datamodules import PythonSourceDataModule
        >>> data = PythonSourceDataModule(num_tokens=64, max_bytes=100_000)  # the source of Python's own library
    """

    text_name = "python-source"
    splitter = "code"

    def __init__(
        self,
        num_tokens: int = 64,
        batch_size: int = 32,
        vocab_size: int | None = 4000,
        num_workers: int = 0,
        max_bytes: int = 4_000_000,
        folder: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(num_tokens, batch_size, num_workers, vocab_size, "word", cache_dir)
        self.max_bytes = check_at_least("max_bytes", max_bytes, 1)
        self.folder = Path(folder or sysconfig.get_path("stdlib")).expanduser().absolute()
        if not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is no folder of Python source: give one as folder=...")

    @property
    def where(self) -> str:
        return f"{self.folder} gave {len(self._files)} files (max_bytes={self.max_bytes}): at least 6 are needed"

    def source_identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for path in self._files:
            digest.update(path.relative_to(self.folder).as_posix().encode() + b"\0" + path.read_bytes())
        return {"sha256": digest.hexdigest()}

    def num_lines(self, split: str) -> int:
        return sum(len(lines) for lines in self.lines(split))

    def lines(self, split: str) -> Iterator[list[str]]:
        for index, path in enumerate(self._files):
            if _SPLIT_OF_TENTH.get(index % 10, "train") == split:
                yield [f"{line}\n" for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]

    @cached_property
    def _files(self) -> list[Path]:
        found = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*.py")
            if _LEFT_OUT.isdisjoint(path.relative_to(self.folder).parts)
        }
        taken, size = [], 0
        for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
            size += found[name].stat().st_size
            if size > self.max_bytes:
                break
            taken.append(found[name])
        return taken
