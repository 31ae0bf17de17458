import builtins

import pytest
from attnswap.datamodules import WikiTextDataModule
from attnswap.datamodules.shared.tokenizers import BPETokenizer, PretrainedTokenizer, WordTokenizer

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


class TestPretrained:
    @pytest.fixture
    def folder(self, tmp_path):
        transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
        trained = BPETokenizer.train([[" the cat sat on the mat \n"] * 5], 270)
        trained.save(tmp_path)
        made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bpe.json"), eos_token="<eos>")
        made.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_lines_are_taken_as_they_are(self, folder):
        tokenizer = PretrainedTokenizer.load(folder)
        assert tokenizer.decode(tokenizer.encode([" the cat\n", "sat\n"])) == " the cat\nsat\n"
        assert (tokenizer.start_id, tokenizer.encode([]).tolist()) == (1, [])

    def test_a_data_module_takes_it(self, folder, wikitext_root, tmp_path):
        data = WikiTextDataModule("wikitext-2-v1", wikitext_root, tokenizer=str(folder), cache_dir=tmp_path / "cache")
        data.setup()
        assert data.decode(data.tokens("test")) == "".join(line for lines in data.lines("test") for line in lines)
        assert data.train_dataloader().dataset.start == 1
        before = data._cache_entry()
        text = (folder / "tokenizer_config.json").read_text()
        (folder / "tokenizer_config.json").write_text(text + " ")
        assert data._cache_entry() != before

    @pytest.mark.parametrize(
        "files",
        [
            {"tokenizer.json": "{"},
            {"tokenizer.json": "{}"},
            {"tokenizer_config.json": "[]"},
            {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}', "evil.py": "1 / 0"},
        ],
    )
    def test_a_folder_of_anything_is_refused_and_runs_no_code(self, folder, wikitext_root, tmp_path, files):
        if "evil.py" in files:
            (folder / "tokenizer.json").unlink()
        for name, text in files.items():
            (folder / name).write_text(text)
        data = WikiTextDataModule("wikitext-2-v1", wikitext_root, tokenizer=str(folder), cache_dir=tmp_path / "cache")
        with pytest.raises(ValueError, match=r"the tokenizer in .*model cannot be read .*; give a folder that its"):
            data.setup()

    def test_what_it_has_itself_is_not_asked_for(self, folder, wikitext_root):
        with pytest.raises(ValueError, match=r"vocab_size is 300, and the tokenizer of .* has its own: leave it out"):
            WikiTextDataModule("wikitext-2-v1", wikitext_root, tokenizer=str(folder), vocab_size=300)
