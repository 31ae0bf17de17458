"""Tokenizers: lines of text to ids and back, trained on the train split or a pretrained model's, in a cache folder."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
SPECIAL_TOKENS = (UNKNOWN, END_OF_LINE)
UNKNOWN_ID, END_OF_LINE_ID = 0, 1
DEFAULT_BPE_SIZE = 8192
MIN_WORD_SIZE = len(SPECIAL_TOKENS) + 1
MIN_BPE_SIZE = len(SPECIAL_TOKENS) + 256  # a byte-level BPE starts from all 256 bytes

_CODE = re.compile(r"^[ \t]+|\w+|[^\w\s]")

SPLITTERS: dict[str, Callable[[str], list[str]]] = {"words": str.split, "code": _CODE.findall}
"""Ways to split a line: at whitespace, or into indentation, names, numbers and single signs."""


class Tokenizer(ABC):
    """Lines to ids; those that are trained end each line by `<eos>`: id 0 is `<unk>`, id 1 is `<eos>`."""

    file_name: str
    vocab_size: int
    start_id = END_OF_LINE_ID
    """The id that stands before the text's first."""

    @abstractmethod
    def encode(self, lines: Sequence[str]) -> np.ndarray:
        """The ids of `lines` in one stream, `[tokens]` int32."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, a new line for each `<eos>`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the vocabulary into `folder`."""


class WordTokenizer(Tokenizer):
    """One id per word: `words` in the order of their ids, `<unk>` and `<eos>` first."""

    file_name = "vocabulary.json"

    def __init__(self, words: Sequence[str], splitter: str = "words") -> None:
        self.words = list(words)
        self.splitter = splitter
        self.vocab_size = len(self.words)
        self._ids = {word: index for index, word in enumerate(self.words)}

    @classmethod
    def train(cls, batches: Iterable[Sequence[str]], limit: int | None, splitter: str = "words") -> "WordTokenizer":
        """Keeps the most frequent words, at most `limit` with `<unk>` and `<eos>`; ties in order of appearance."""
        split = SPLITTERS[splitter]
        counts: Counter[str] = Counter()
        for lines in batches:
            for line in lines:
                counts.update(split(line))
        for special in SPECIAL_TOKENS:
            counts.pop(special, None)
        kept = counts.most_common(None if limit is None else limit - len(SPECIAL_TOKENS))
        return cls([*SPECIAL_TOKENS, *(word for word, _ in kept)], splitter)

    @classmethod
    def load(cls, folder: Path) -> "WordTokenizer":
        stored = json.loads((folder / cls.file_name).read_text(encoding="utf-8"))
        words, splitter = stored["words"], stored["splitter"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or splitter not in SPLITTERS:
            raise ValueError("words must be a list of texts, and splitter one of " + ", ".join(SPLITTERS))
        if words[: len(SPECIAL_TOKENS)] != list(SPECIAL_TOKENS):
            raise ValueError(f"the first words must be {', '.join(SPECIAL_TOKENS)}")
        return cls(words, splitter)

    def encode(self, lines: Sequence[str]) -> np.ndarray:
        split, ids = SPLITTERS[self.splitter], self._ids
        words = chain.from_iterable((*split(line), END_OF_LINE) for line in lines)
        return np.fromiter((ids.get(word, UNKNOWN_ID) for word in words), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return _join_lines((self.words[index] for index in ids), " ".join)

    def save(self, folder: Path) -> None:
        text = json.dumps({"splitter": self.splitter, "words": self.words}, ensure_ascii=False)
        (folder / self.file_name).write_text(text, encoding="utf-8")


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, trained with the `tokenizers` library."""

    file_name = "bpe.json"

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()

    @classmethod
    def train(cls, batches: Iterable[Sequence[str]], limit: int | None) -> "BPETokenizer":
        """Learns merges until there are `limit` tokens (8,192 where None), or until the text has no more pairs."""
        library = _tokenizers()
        backend = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN))
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=DEFAULT_BPE_SIZE if limit is None else limit,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((line.strip("\n") for lines in batches for line in lines), trainer)
        return cls(backend)

    @classmethod
    def load(cls, folder: Path) -> "BPETokenizer":
        return cls(_tokenizers().Tokenizer.from_file(str(folder / cls.file_name)))

    def encode(self, lines: Sequence[str]) -> np.ndarray:
        encodings = self._backend.encode_batch([line.strip("\n") for line in lines])
        ids = chain.from_iterable((*encoding.ids, END_OF_LINE_ID) for encoding in encodings)
        return np.fromiter(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        tokens = (self._backend.id_to_token(int(index)) for index in ids)
        return _join_lines(tokens, self._backend.decoder.decode)

    def save(self, folder: Path) -> None:
        self._backend.save(str(folder / self.file_name))


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a pretrained Hugging Face model, which takes lines as they are; none of its special tokens.

    Args:
        backend: as `transformers.AutoTokenizer` loads it.
    """

    file_name = "tokenizer_config.json"

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.vocab_size = 1 + max(backend.get_vocab().values())
        ends = (backend.bos_token_id, backend.eos_token_id, backend.cls_token_id)
        self.start_id = next((index for index in ends if index is not None), 0)

    @classmethod
    def load(cls, folder: Path) -> "PretrainedTokenizer":
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError("the tokenizer of a folder needs the extra: pip install 'attnswap[hf]'") from error
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
        except Exception as error:  # of many kinds, as a folder may hold anything
            said = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {said}); give a folder that its "
                "save_pretrained wrote"
            ) from error

    def encode(self, lines: Sequence[str]) -> np.ndarray:
        ids = self._backend(list(lines), add_special_tokens=False, verbose=False)["input_ids"] if lines else []
        return np.fromiter(chain.from_iterable(ids), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode([int(index) for index in ids])

    def save(self, folder: Path) -> None:
        self._backend.save_pretrained(str(folder))


def digest_of(folder: Path) -> str:
    """What tells the tokenizer files of two folders apart: all files but the weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _join_lines(tokens: Iterable[str], join: Callable[[list[str]], str]) -> str:
    def lines() -> Iterator[str]:
        line: list[str] = []
        for token in tokens:
            if token == END_OF_LINE:
                yield join(line) + "\n"
                line = []
            else:
                line.append(token)
        yield join(line)

    return "".join(lines())


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizer='bpe' needs the library `tokenizers`: pip install 'attnswap[hf]'") from error
    return tokenizers
