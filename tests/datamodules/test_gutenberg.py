import os
from pathlib import Path

import pytest
from attnswap.datamodules import GutenbergDataModule


@pytest.fixture
def root(tmp_path):
    (tmp_path / "gutenberg").mkdir()
    (tmp_path / "gutenberg" / "book.txt").write_text("".join(f"line {index}\n" for index in range(20)))
    return tmp_path


def test_the_splits_follow_on_and_hold_every_line_once(root, cache):
    data = GutenbergDataModule("book", root=root, num_tokens=3, batch_size=2, cache_dir=cache)
    data.setup()
    splits = [data.lines(split) for split in ("train", "validation", "test")]
    lines = [list(batch) for split in splits for batch in split]
    assert [len(batch) for batch in lines] == [16, 2, 2]
    assert [line for batch in lines for line in batch] == [f"line {index}\n" for index in range(20)]
    assert data.decode(data.tokens("train")).startswith("line 0\nline 1\n")
    assert len(data.tokens("validation")) == 6


def test_alice(cache):
    path = Path(os.environ.get("ATTNSWAP_DATA", "/nonexistent"))
    if not (path / "gutenberg" / "carroll-alice.txt").is_file():
        pytest.skip("Alice is not under $ATTNSWAP_DATA")
    data = GutenbergDataModule(root=path, num_tokens=16, cache_dir=cache)
    data.setup()
    assert data.decode(data.tokens("train")[:8]) == "[Alice's Adventures in Wonderland by Lewis Carroll 1865]"
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (32, 16)


def test_what_is_missing_empty_or_no_text_is_named(root, cache):
    with pytest.raises(FileNotFoundError, match=r"other\.txt is missing.*nltk.*ATTNSWAP_DATA"):
        GutenbergDataModule("other", root=root, cache_dir=cache).setup()
    (root / "gutenberg" / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"train split of gutenberg-empty has 0 tokens.*empty\.txt"):
        GutenbergDataModule("empty", root=root, cache_dir=cache).setup()
    (root / "gutenberg" / "latin.txt").write_bytes(b"caf\xe9\n" * 20)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 .*byte 3.*convert"):
        GutenbergDataModule("latin", root=root, cache_dir=cache).setup()
    with pytest.raises(ValueError, match=r"name is '\.\./book'"):
        GutenbergDataModule("../book", root=root)


def test_a_pretrained_tokenizer_sees_the_line_breaks(root, cache, tmp_path):
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("tokenizers")
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], library.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "own")
    (root / "gutenberg" / "book.txt").write_text("one\n\ntwo\n" * 10)
    data = GutenbergDataModule("book", root=root, tokenizer=str(tmp_path / "own"), num_tokens=3, cache_dir=cache)
    data.setup()
    assert data.decode(data.tokens("train")).startswith("one\n\ntwo\none\n")
