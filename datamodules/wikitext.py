"""WikiText-2 and WikiText-103 (Merity et al. 2016), tokenized by their authors or raw."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .shared.base import check_flag
from .shared.hub import count_rows, download_parquet, read_column
from .shared.paths import data_root
from .text import SPLITS, TextDataModule

REPOSITORY = "Salesforce/wikitext"
NAMES = ("wikitext-2-v1", "wikitext-2-raw-v1", "wikitext-103-v1", "wikitext-103-raw-v1")
_LINES_A_BATCH = 1024


class WikiTextDataModule(TextDataModule):
    """WikiText read from parquet files in the hub's layout: `root/wikitext/NAME/train-00000-of-00001.parquet`, ...

    With the tokenizer "word", words are what stands between spaces, and every line ends with `<eos>`.

    Args:
        name: "wikitext-2-v1", "wikitext-2-raw-v1", "wikitext-103-v1" or "wikitext-103-raw-v1".
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        num_tokens: T, tokens per window.
        batch_size: windows a batch and process.
        num_workers: loader processes.
        vocab_size: the most ids, `<unk>` and `<eos>` included; None for all words, or for 8,192 BPE tokens.
        tokenizer: "word", "bpe", or the folder of a pretrained model (these two need the extra `hf`).
        download: fetch missing files from the hub into `root`; otherwise they are an error.
        cache_dir: folder for prepared ids; None for `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        ValueError: an unknown name or tokenizer, or a number below its limit.
        NotADirectoryError: `root` or `cache_dir` is a file.

    Example:
        >>> from attnswap.datamodules import WikiTextDataModule
        >>> data = WikiTextDataModule("wikitext-2-v1", root="/data", num_tokens=64)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str = "wikitext-2-v1",
        root: str | os.PathLike[str] | None = None,
        num_tokens: int = 64,
        batch_size: int = 64,
        num_workers: int = 0,
        vocab_size: int | None = None,
        tokenizer: str = "word",
        download: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if name not in NAMES:
            raise ValueError(f"name is {name!r}: give one of {', '.join(map(repr, NAMES))}")
        super().__init__(num_tokens, batch_size, num_workers, vocab_size, tokenizer, cache_dir)
        self.text_name = name
        self.folder = data_root(root) / "wikitext" / name
        self.download = check_flag("download", download)

    @property
    def where(self) -> str:
        return f"it was read from {self.folder}"

    def prepare_data(self) -> None:
        if self.download and not all(path.exists() for split in SPLITS for path in self._named_shards(split)):
            download_parquet(REPOSITORY, self.text_name, self.folder, SPLITS)
        super().prepare_data()

    def source_identity(self) -> dict[str, Any]:
        stats = {path.name: path.stat() for split in SPLITS for path in self._shards(split)}
        return {"files": {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}}

    def num_lines(self, split: str) -> int:
        return sum(count_rows(path) for path in self._shards(split))

    def lines(self, split: str) -> Iterator[list[str]]:
        for path in self._shards(split):
            yield from read_column(path, "text", _LINES_A_BATCH)

    def _shards(self, split: str) -> list[Path]:
        shards = self._named_shards(split)
        missing = next((path for path in shards if not path.exists()), None)
        if missing is not None:
            address = f"https://huggingface.co/datasets/{REPOSITORY}/tree/main/{self.text_name}"
            raise FileNotFoundError(
                f"{missing} is missing. Put it there from {address}, "
                "name another folder as root=... or in $ATTNSWAP_DATA, or set download=True"
            )
        return shards

    def _named_shards(self, split: str) -> list[Path]:
        """The files of `split` in order: a complete set where there is one, else the set that is to be completed."""
        matches = map(re.compile(rf"{split}-\d{{5}}-of-(\d{{5}})\.parquet").fullmatch, _names_in(self.folder))
        hub_total = 2 if split == "train" and "-103-" in self.text_name else 1
        totals = sorted({int(match.group(1)) for match in matches if match}) or [hub_total]
        sets = [[self.folder / f"{split}-{index:05d}-of-{n:05d}.parquet" for index in range(n)] for n in totals]
        return next((shards for shards in sets if all(path.exists() for path in shards)), sets[0])


def _names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
