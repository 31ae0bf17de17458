"""One book of Project Gutenberg as plain text, by default Alice's Adventures in Wonderland."""

import os
from collections.abc import Iterator
from typing import Any

from .shared.paths import data_root
from .text import TextDataModule

SOURCE = "https://www.nltk.org/nltk_data/ (gutenberg)"
# Tenths of the lines at which validation and test begin: text follows on within a split, and none is in two.
_BOUNDS = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}


class GutenbergDataModule(TextDataModule):
    """A book read from `root/gutenberg/NAME.txt`: its first 80% of lines train, the next 10% validate, the rest tests.

    With the tokenizer "word", words are what stands between spaces, punctuation included, and every line ends with
    `<eos>`.

    Args:
        name: the file's name without `.txt`.
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        num_tokens: T, tokens per window.
        batch_size: windows a batch and process.
        num_workers: loader processes.
        vocab_size: the most ids, `<unk>` and `<eos>` included; None for all words, or for 8,192 BPE tokens.
        tokenizer: "word", "bpe", or the folder of a pretrained model (these two need the extra `hf`).
        cache_dir: folder for prepared ids; None for `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        ValueError: an unknown tokenizer, a number below its limit, or a name with a path in it.
        NotADirectoryError: `root` or `cache_dir` is a file.

    Example:
        >>> from attnswap.datamodules import GutenbergDataModule
        >>> data = GutenbergDataModule("carroll-alice", root="/data")
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str = "carroll-alice",
        root: str | os.PathLike[str] | None = None,
        num_tokens: int = 64,
        batch_size: int = 32,
        num_workers: int = 0,
        vocab_size: int | None = None,
        tokenizer: str = "word",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not name or os.path.basename(name) != name:
            raise ValueError(f"name is {name!r}: give a file's name below root/gutenberg, without folder and .txt")
        super().__init__(num_tokens, batch_size, num_workers, vocab_size, tokenizer, cache_dir)
        self.text_name = f"gutenberg-{name}"
        self.path = data_root(root) / "gutenberg" / f"{name}.txt"

    @property
    def where(self) -> str:
        return f"it was read from {self.path}, of which at least 10 lines are needed"

    def source_identity(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path} is missing. Put it there, for example from {SOURCE}, "
                "or name another folder as root=... or in $ATTNSWAP_DATA"
            )
        stat = self.path.stat()
        return {"file": (stat.st_size, stat.st_mtime_ns)}

    def num_lines(self, split: str) -> int:
        return len(next(self.lines(split)))

    def lines(self, split: str) -> Iterator[list[str]]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8 ({error.reason}, byte {error.start}): convert it") from error
        first, last = (len(lines) * tenth // 10 for tenth in _BOUNDS[split])
        yield [f"{line}\n" for line in lines[first:last]]
