import builtins

import pytest
from attnswap.datamodules.shared.tokenizers import BPETokenizer, WordTokenizer

LINES = ["b a a\n", "", "c a <unk> b\n"]


class TestWords:
    def test_ids_fall_with_frequency_after_the_special_tokens(self):
        assert WordTokenizer.train([LINES], None).words == ["<unk>", "<eos>", "a", "b", "c"]

    def test_limit_counts_the_special_tokens_and_keeps_the_most_frequent(self):
        tokenizer = WordTokenizer.train([LINES], 4)
        assert tokenizer.words == ["<unk>", "<eos>", "a", "b"]
        assert tokenizer.vocab_size == 4
        assert tokenizer.encode(["c b"]).tolist() == [0, 3, 1]

    def test_batches_do_not_matter(self):
        assert WordTokenizer.train([[line] for line in LINES], None).words == WordTokenizer.train([LINES], None).words

    def test_every_line_ends_with_eos_also_an_empty_one(self):
        assert WordTokenizer.train([LINES], None).encode(LINES).tolist() == [3, 2, 2, 1, 1, 4, 2, 0, 3, 1]

    def test_decode_returns_the_text(self):
        tokenizer = WordTokenizer.train([LINES], None)
        assert tokenizer.decode(tokenizer.encode(LINES)) == "b a a\n\nc a <unk> b\n"

    def test_code_keeps_indentation_and_separates_signs(self):
        tokenizer = WordTokenizer.train([["    return x+1"]], None, "code")
        assert tokenizer.words[2:] == ["    ", "return", "x", "+", "1"]

    @pytest.mark.parametrize("splitter", ["words", "code"])
    def test_saved_and_loaded_is_the_same(self, tmp_path, splitter):
        tokenizer = WordTokenizer.train([["  é = (1)"]], None, splitter)
        tokenizer.save(tmp_path)
        loaded = WordTokenizer.load(tmp_path)
        assert (loaded.words, loaded.splitter) == (tokenizer.words, splitter)


class TestBPE:
    @pytest.fixture
    def tokenizer(self):
        pytest.importorskip("tokenizers", reason="the extra hf is not installed")
        return BPETokenizer.train([[" the cat sat on the mat \n", " the <unk> \n"] * 5], 270)

    def test_size_is_held(self, tokenizer):
        assert tokenizer.vocab_size <= 270

    def test_special_tokens_have_their_ids(self, tokenizer):
        assert tokenizer.encode([" <unk>\n", ""]).tolist()[-3:] == [0, 1, 1]

    def test_no_text_is_unknown_and_decodes_to_itself(self, tokenizer):
        ids = tokenizer.encode([" Zürich ✓\n", " the cat\n"])
        assert 0 not in ids
        assert tokenizer.decode(ids) == " Zürich ✓\n the cat\n"

    def test_saved_and_loaded_is_the_same(self, tokenizer, tmp_path):
        tokenizer.save(tmp_path)
        assert BPETokenizer.load(tmp_path).encode([" the mat"]).tolist() == tokenizer.encode([" the mat"]).tolist()


def test_missing_library_names_the_extra(monkeypatch):
    plain = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError(name)
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"attnswap\[hf\]"):
        BPETokenizer.train([["a"]], 300)
