"""AG News (Zhang, Zhao and LeCun 2015): short news articles as text; their classes are not read."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .shared.base import check_flag
from .shared.hub import count_rows, download_parquet, find_shards, read_column
from .shared.paths import data_root
from .text import TextDataModule

REPOSITORY = "fancyzhx/ag_news"
_ROWS_A_BATCH = 1024
# The release has no validation split: every tenth article of train is held out.
_HELD_OUT = 10


class AGNewsDataModule(TextDataModule):
    """AG News read from parquet files in the hub's layout: `root/ag_news/data/{train,test}-XXXXX-of-YYYYY.parquet`.

    An article is a line, which ends with `<eos>`; every tenth of train, from the first on, is for validation.

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        num_tokens: T, tokens per window.
        batch_size: windows a batch and process.
        num_workers: loader processes.
        vocab_size: the most ids, `<unk>` and `<eos>` included; None for all words, or for 8,192 BPE tokens.
        tokenizer: "word", "bpe", or the folder of a pretrained model (these two need the extra `hf`).
        download: fetch missing files from the hub into `root`; otherwise they are an error.
        cache_dir: folder for prepared ids; None for `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        ValueError: an unknown tokenizer, or a number below its limit.
        NotADirectoryError: `root` or `cache_dir` is a file.

    Example:
        >>> from attnswap.datamodules import AGNewsDataModule
        >>> data = AGNewsDataModule(root="/data", num_tokens=64)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    text_name = "ag_news"

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        num_tokens: int = 64,
        batch_size: int = 64,
        num_workers: int = 0,
        vocab_size: int | None = None,
        tokenizer: str = "word",
        download: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(num_tokens, batch_size, num_workers, vocab_size, tokenizer, cache_dir)
        self.folder = data_root(root) / "ag_news" / "data"
        self.download = check_flag("download", download)

    @property
    def where(self) -> str:
        return f"it was read from {self.folder}"

    def prepare_data(self) -> None:
        if self.download and not all(find_shards(self.folder, split) for split in ("train", "test")):
            download_parquet(REPOSITORY, "default", self.folder, ("train", "test"))
        super().prepare_data()

    def source_identity(self) -> dict[str, Any]:
        stats = {path.name: path.stat() for split in ("train", "test") for path in self._shards(split)}
        return {"files": {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}}

    def num_lines(self, split: str) -> int:
        rows = sum(count_rows(path) for path in self._shards(split))
        held_out = -(-rows // _HELD_OUT)
        return {"train": rows - held_out, "validation": held_out, "test": rows}[split]

    def lines(self, split: str) -> Iterator[list[str]]:
        first = 0
        for path in self._shards(split):
            for texts in read_column(path, "text", _ROWS_A_BATCH):
                yield [
                    f"{text}\n"
                    for index, text in enumerate(texts, start=first)
                    if split == "test" or (index % _HELD_OUT == 0) == (split == "validation")
                ]
                first += len(texts)

    def _shards(self, split: str) -> list[Path]:
        shards = find_shards(self.folder, "test" if split == "test" else "train")
        if not shards:
            release = "test" if split == "test" else "train"
            raise FileNotFoundError(
                f"{self.folder / f'{release}-00000-of-00001.parquet'} is missing. Put it there from "
                f"https://huggingface.co/datasets/{REPOSITORY}/tree/main/data, "
                "name another folder as root=... or in $ATTNSWAP_DATA, or set download=True"
            )
        return shards
