import multiprocessing
import os

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attnswap.datamodules import WikiTextDataModule

from tests.datamodules.conftest import LINES, SPLITS, write_split
from tests.rows import each_row

NAME = "wikitext-2-v1"


@pytest.fixture
def data(wikitext_root, cache):
    return WikiTextDataModule(NAME, root=wikitext_root, num_tokens=4, batch_size=2, cache_dir=cache)


class TestRealData:
    def test_counts_are_the_published_ones(self, real_root, cache):
        data = WikiTextDataModule(NAME, root=real_root, cache_dir=cache)
        data.setup()
        assert data.vocab_size == 33_278
        assert [len(data.tokens(split)) for split in SPLITS] == [2_088_628, 217_646, 245_569]
        assert sum(int((targets >= 0).sum()) for _, targets in data.val_dataloader()) == 217_646
        words = data.decode(data.tokens("validation")[:20])
        assert words.startswith("\n= Homarus gammarus =\n\nHomarus gammarus , known as")

    def test_capped_vocabulary(self, real_root, cache):
        data = WikiTextDataModule(NAME, root=real_root, vocab_size=4000, cache_dir=cache)
        data.setup()
        assert data.vocab_size == 4000
        assert len(data.tokens("validation")) == 217_646
        assert int(np.max(data.tokens("train"))) == 3999
        assert (data.tokens("train")[:] == 0).mean() == pytest.approx(0.181, abs=0.001)


def test_tokens_vocabulary_and_text(data):
    data.setup()
    assert data.vocab_size == 10
    assert data.decode(data.tokens("train")) == "\n= Title =\nthe cat sat on the mat\nthe dog <unk>\n"
    assert data.decode(data.tokens("validation")) == "the cat <unk>\n\n"


def test_bpe(wikitext_root, cache):
    pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    data = WikiTextDataModule(NAME, root=wikitext_root, tokenizer="bpe", vocab_size=280, cache_dir=cache)
    data.setup()
    assert data.vocab_size <= 280
    assert data.decode(data.tokens("validation")) == " the cat barks \n\n"


def test_shards_are_read_in_order(wikitext_root, cache):
    folder = wikitext_root / "wikitext" / NAME
    (folder / "train-00000-of-00001.parquet").unlink()
    write_split(folder, "train", LINES["train"][2:], 1, 2)
    write_split(folder, "train", LINES["train"][:2], 0, 2)
    data = WikiTextDataModule(NAME, root=wikitext_root, cache_dir=cache)
    data.setup()
    assert data.decode(data.tokens("train")) == "\n= Title =\nthe cat sat on the mat\nthe dog <unk>\n"


def test_the_root_is_left_alone(data, wikitext_root, contents):
    before = contents(wikitext_root)
    data.setup()
    assert contents(wikitext_root) == before


def _prepare(root, cache):
    WikiTextDataModule(NAME, root=root, cache_dir=cache).prepare_data()


def test_two_processes_prepare_at_once(wikitext_root, cache):
    both = [multiprocessing.get_context("fork").Process(target=_prepare, args=(wikitext_root, cache)) for _ in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert len([name for name in os.listdir(cache / NAME) if not name.endswith(".lock")]) == 1


class TestMissing:
    def test_every_missing_file_is_named_with_its_source(self, data, wikitext_root, cache):
        missing = wikitext_root / "wikitext" / NAME / "validation-00000-of-00001.parquet"
        missing.unlink()
        with pytest.raises(
            FileNotFoundError, match=rf"{missing} is missing.*Salesforce/wikitext.*{NAME}.*download=True"
        ):
            data.prepare_data()
        assert not cache.exists()

    def test_a_missing_shard_is_named(self, wikitext_root, cache):
        folder = wikitext_root / "wikitext" / NAME
        (folder / "train-00000-of-00001.parquet").unlink()
        write_split(folder, "train", LINES["train"], 0, 3)
        write_split(folder, "train", LINES["train"], 2, 3)
        with pytest.raises(FileNotFoundError, match=r"train-00001-of-00003\.parquet is missing"):
            WikiTextDataModule(NAME, root=wikitext_root, cache_dir=cache).setup()

    def test_wikitext_103_has_two_train_shards_on_the_hub(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"wikitext-103-v1/train-00000-of-00002\.parquet"):
            WikiTextDataModule("wikitext-103-v1", root=tmp_path).prepare_data()


@pytest.mark.parametrize(("values", "problem"), [([1, 2], "int64 in the column"), (["a", None], "1 empty")])
def test_a_column_of_something_else_than_strings_is_named(wikitext_root, cache, values, problem):
    path = wikitext_root / "wikitext" / NAME / "test-00000-of-00001.parquet"
    pq.write_table(pa.table({"text": values}), path)
    with pytest.raises(ValueError, match=f"{path} has {problem}"):
        WikiTextDataModule(NAME, root=wikitext_root, cache_dir=cache).prepare_data()


def test_a_broken_parquet_file_is_named(data, wikitext_root, cache, contents):
    broken = wikitext_root / "wikitext" / NAME / "test-00000-of-00001.parquet"
    os.truncate(broken, 20)
    with pytest.raises(ValueError, match=f"{broken} is no whole parquet file"):
        data.prepare_data()
    assert contents(cache) == {NAME}


def test_an_empty_split_is_an_error_and_leaves_nothing(data, wikitext_root, cache, contents):
    write_split(wikitext_root / "wikitext" / NAME, "test", [])
    with pytest.raises(ValueError, match=f"the test split of {NAME} has 0 tokens.*{wikitext_root}"):
        data.prepare_data()
    assert contents(cache) == {NAME}


def test_a_corrupt_cache_is_made_again(data, wikitext_root, cache):
    data.setup()
    expected = data.tokens("train").tolist()
    (next(cache.rglob("train.bin"))).write_bytes(b"nonsense")
    again = WikiTextDataModule(NAME, root=wikitext_root, cache_dir=cache)
    with pytest.warns(UserWarning, match="is corrupt and is made again"):
        again.setup()
    assert again.tokens("train").tolist() == expected


class TestDownload:
    @pytest.fixture
    def hub(self, monkeypatch):
        calls = []

        def load_dataset(repository, name):
            calls.append((repository, name))
            return {split: datasets.Dataset.from_dict({"text": LINES[split]}) for split in SPLITS}

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    def test_it_fetches_into_the_hubs_layout_once(self, hub, tmp_path, cache):
        for _ in range(2):
            data = WikiTextDataModule(NAME, root=tmp_path / "new", cache_dir=cache, download=True)
            data.setup()
        assert hub == [("Salesforce/wikitext", NAME)]
        assert sorted(os.listdir(tmp_path / "new" / "wikitext" / NAME)) == [
            f"{split}-00000-of-00001.parquet" for split in sorted(SPLITS)
        ]
        assert data.decode(data.tokens("validation")) == "the cat <unk>\n\n"

    def test_it_completes_what_is_there_in_part_and_reads_nothing_twice(self, hub, tmp_path, cache):
        write_split(tmp_path / "wikitext" / NAME, "train", LINES["train"], 0, 2)
        data = WikiTextDataModule(NAME, root=tmp_path, cache_dir=cache, download=True)
        data.setup()
        assert len(hub) == 1
        assert len(data.tokens("train")) == 16

    def test_never_without_being_asked(self, hub, tmp_path):
        with pytest.raises(FileNotFoundError):
            WikiTextDataModule(NAME, root=tmp_path).setup()
        assert hub == []

    def test_not_when_the_files_are_there(self, hub, wikitext_root, cache):
        WikiTextDataModule(NAME, root=wikitext_root, cache_dir=cache, download=True).setup()
        assert hub == []

    def test_an_unwritable_root_is_found_before_fetching(self, hub, tmp_path):
        (tmp_path / "wikitext").touch()
        with pytest.raises(OSError, match=r"cannot be downloaded.*root=.*\$ATTNSWAP_DATA"):
            WikiTextDataModule(NAME, root=tmp_path, download=True).prepare_data()
        assert hub == []

    def test_a_failed_fetch_leaves_nothing(self, monkeypatch, tmp_path):
        def fail(repository, name):
            raise ConnectionError("no network")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        cure = rf"Salesforce/wikitext .*\(ConnectionError: no network\).*tree/main/{NAME} into .*{NAME}"
        with pytest.raises(OSError, match=cure):
            WikiTextDataModule(NAME, root=tmp_path / "new", download=True).prepare_data()
        assert os.listdir(tmp_path) == []

    def test_a_failed_fetch_takes_no_file_of_the_user_s(self, monkeypatch, tmp_path):
        def fail(repository, name):
            raise KeyboardInterrupt

        monkeypatch.setattr(datasets, "load_dataset", fail)
        write_split(tmp_path / "wikitext" / NAME, "train", LINES["train"])
        (tmp_path / "empty").mkdir()
        with pytest.raises(KeyboardInterrupt):
            WikiTextDataModule(NAME, root=tmp_path, download=True).prepare_data()
        assert sorted(os.listdir(tmp_path)) == ["empty", "wikitext"]
        assert os.listdir(tmp_path / "wikitext" / NAME) == ["train-00000-of-00001.parquet"]


BAD = {
    "name": ({"name": "../wikitext-2-v1"}, r"name is '\.\./wikitext-2-v1': give one of 'wikitext-2-v1'"),
    "num_tokens": ({"num_tokens": 0}, "num_tokens is 0: give an integer of at least 1"),
    "fraction": ({"num_tokens": 1.5}, r"num_tokens is 1\.5"),
    "batch_size": ({"batch_size": -1}, "batch_size is -1: give an integer of at least 1"),
    "num_workers": ({"num_workers": -1}, "num_workers is -1: give an integer of at least 0"),
    "tokenizer": ({"tokenizer": "char"}, "tokenizer is 'char': give one of 'word', 'bpe'"),
    "vocab_size": ({"vocab_size": 2}, "vocab_size is 2: give an integer of at least 3"),
    "bpe": ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size is 100: give an integer of at least 258"),
}


@each_row(("arguments", "message"), BAD.values())
def test_bad_arguments_are_named_with_limit_and_cure(arguments, message):
    with pytest.raises(ValueError, match=message):
        WikiTextDataModule(**arguments)
