"""What text data modules share: a vocabulary, cached ids, and loaders of windows for language modeling."""

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from .shared.base import DataModule, check_at_least
from .shared.loader import ResumableLoader
from .shared.paths import cache_root
from .shared.token_cache import CacheEntry, write_tokens
from .shared.tokenizers import (
    MIN_BPE_SIZE,
    MIN_WORD_SIZE,
    BPETokenizer,
    PretrainedTokenizer,
    Tokenizer,
    WordTokenizer,
    digest_of,
)
from .shared.windows import TokenWindows

SPLITS = ("train", "validation", "test")
_Class = type[WordTokenizer] | type[BPETokenizer] | type[PretrainedTokenizer]
_TOKENIZERS: dict[str, tuple[_Class, int]] = {
    "word": (WordTokenizer, MIN_WORD_SIZE),
    "bpe": (BPETokenizer, MIN_BPE_SIZE),
}


class TextDataModule(DataModule):
    """Text as windows of tokens: batches are (inputs `[B, T]`, targets `[B, T]`), int64, ids below `vocab_size`.

    Training windows come in a new order each epoch, those of the other splits in the order of the text; every token
    is a target once, and what fills up the last window has the target -100. See `docs/data.md`.

    Args:
        num_tokens: T, tokens per window.
        batch_size: windows a batch and process.
        num_workers: loader processes.
        vocab_size: the most ids, `<unk>` and `<eos>` included; None for all words, or for 8,192 BPE tokens.
        tokenizer: "word", "bpe", or the folder of a pretrained Hugging Face model, whose tokenizer is taken as it is.
        cache_dir: folder for prepared ids; None for `$ATTNSWAP_CACHE`, else the user's cache folder.

    Raises:
        ValueError: a number is below its limit, the tokenizer is unknown, or `vocab_size` is given beside a folder.
        NotADirectoryError: `cache_dir` is a file.

    Example:
        >>> from attnswap.datamodules import TextDataModule, WikiTextDataModule
        >>> issubclass(WikiTextDataModule, TextDataModule)
        True
    """

    text_name: str
    """The name of the text, also of its folder in the cache."""
    splitter = "words"

    def __init__(
        self,
        num_tokens: int,
        batch_size: int,
        num_workers: int,
        vocab_size: int | None,
        tokenizer: str,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.num_tokens = check_at_least("num_tokens", num_tokens, 1)
        self._pretrained = None if tokenizer in _TOKENIZERS else Path(tokenizer)
        if self._pretrained is not None and not (self._pretrained / PretrainedTokenizer.file_name).is_file():
            raise ValueError(
                f"tokenizer is {tokenizer!r}: give one of {', '.join(map(repr, _TOKENIZERS))}, or the folder of a "
                f"pretrained model, with its {PretrainedTokenizer.file_name}"
            )
        if self._pretrained is not None and vocab_size is not None:
            raise ValueError(f"vocab_size is {vocab_size}, and the tokenizer of {tokenizer} has its own: leave it out")
        self._tokenizer_class, smallest = _TOKENIZERS.get(tokenizer, (PretrainedTokenizer, 1))
        self.max_vocab_size = None if vocab_size is None else check_at_least("vocab_size", vocab_size, smallest)
        self.tokenizer_name = tokenizer
        self.cache_dir = cache_root(cache_dir)
        self._tokenizer: Tokenizer | None = None
        self._entry: CacheEntry | None = None

    @abstractmethod
    def source_identity(self) -> Mapping[str, Any]:
        """Plain data that changes whenever the text does; raises where the text is missing."""

    @abstractmethod
    def num_lines(self, split: str) -> int:
        """Lines of `split`, for the progress bar."""

    @abstractmethod
    def lines(self, split: str) -> Iterator[list[str]]:
        """The lines of `split` in order, with their line breaks, in batches."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, known after `setup`."""
        return self._ready(self._tokenizer).vocab_size

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """The text of `ids` `[tokens]`; targets of -100 are left out."""
        plain = ids.tolist() if isinstance(ids, Tensor) else ids
        return self._ready(self._tokenizer).decode(index for index in plain if index >= 0)

    def tokens(self, split: str) -> np.ndarray:
        """The ids of `split` ("train", "validation" or "test") in one stream, `[tokens]`, a memory map."""
        return self._ready(self._entry).tokens(split)

    def prepare_data(self) -> None:
        """Builds vocabulary and ids in the cache, unless they are there and whole."""
        self._cache_entry().prepare(self._write)

    def setup(self, stage: str | None = None) -> None:
        """Opens what `prepare_data` made; without a trainer, which calls it, also calls it."""
        if self.trainer is None or not self._cache_entry().exists():
            self.prepare_data()
        self._entry = self._cache_entry()
        try:
            self._tokenizer = self._tokenizer_class.load(self._entry.folder)
        except ImportError:
            raise
        except Exception as error:  # of JSON, or of the library of the tokenizer
            path = self._entry.folder / self._tokenizer_class.file_name
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}; delete this folder") from error

    def train_dataloader(self) -> DataLoader:
        windows = TokenWindows(self.tokens("train"), self.num_tokens, self._ready(self._tokenizer).start_id)
        return self._loader(windows, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._in_order("validation")

    def test_dataloader(self) -> DataLoader:
        return self._in_order("test")

    def predict_dataloader(self) -> DataLoader:
        return self._in_order("test")

    def __repr__(self) -> str:
        name = f"{type(self).__name__}({self.text_name}, {self.tokenizer_name} tokens, windows of {self.num_tokens}"
        if self._entry is None:
            return f"{name}, not set up)"
        counts = ", ".join(f"{split} {len(self.tokens(split)):,}" for split in SPLITS)
        return f"{name}, vocabulary {self.vocab_size:,}, {counts} tokens)"

    __str__ = __repr__

    def _cache_entry(self) -> CacheEntry:
        name = self.tokenizer_name if self._pretrained is None else digest_of(self._pretrained)
        settings = {"tokenizer": name, "splitter": self.splitter, "vocab_size": self.max_vocab_size}
        return CacheEntry.of(self.cache_dir, self.text_name, {**settings, "source": self.source_identity()})

    def _write(self, folder: Path) -> None:
        tokenizer = self._train_tokenizer()
        tokenizer.save(folder)
        for split in SPLITS:
            chunks = (tokenizer.encode(lines) for lines in self._shown(split, f"{self.text_name}: {split} ids"))
            if not write_tokens(folder, split, chunks, tokenizer.vocab_size):
                raise ValueError(
                    f"the {split} split of {self.text_name} has 0 tokens: at least 1 is needed; {self.where}"
                )

    def _train_tokenizer(self) -> Tokenizer:
        if self._pretrained is not None:
            return PretrainedTokenizer.load(self._pretrained)
        batches = self._shown("train", f"{self.text_name}: vocabulary")
        if self._tokenizer_class is BPETokenizer:
            return BPETokenizer.train(batches, self.max_vocab_size)
        return WordTokenizer.train(batches, self.max_vocab_size, self.splitter)

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the text is read, for errors."""

    def _shown(self, split: str, what: str) -> Iterator[list[str]]:
        with tqdm(total=self.num_lines(split), desc=what, unit=" lines", unit_scale=True, disable=None) as bar:
            for lines in self.lines(split):
                yield lines
                bar.update(len(lines))

    def _in_order(self, split: str) -> DataLoader:
        start = self._ready(self._tokenizer).start_id
        windows = TokenWindows(self.tokens(split), self.num_tokens, start, multiple_of=self.world_size)
        return self._loader(windows, shuffle=False)

    def _loader(self, windows: TokenWindows, shuffle: bool) -> DataLoader:
        return ResumableLoader(
            windows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.loader_workers,
            persistent_workers=self.loader_workers > 0,
            collate_fn=_as_it_is,
        )

    def _ready(self, value: Any) -> Any:
        if value is None:
            raise RuntimeError(f"{type(self).__name__} is not set up: call setup(), or let the Trainer do it")
        return value


def _as_it_is(batch: Any) -> Any:
    return batch
