import os
from pathlib import Path

import datasets
import pytest
from attnswap.datamodules import AGNewsDataModule

from tests.datamodules.conftest import write_split

ARTICLES = {"train": [f"article {index}" for index in range(25)], "test": ["other 0", "other 1"]}


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data" / "ag_news" / "data"
    write_split(folder, "train", ARTICLES["train"][:13], 0, 2)
    write_split(folder, "train", ARTICLES["train"][13:], 1, 2)
    write_split(folder, "test", ARTICLES["test"])
    return tmp_path / "data"


def lines(data, split):
    return [line.removesuffix("\n") for batch in data.lines(split) for line in batch]


def test_every_tenth_article_is_held_out(root, cache):
    data = AGNewsDataModule(root=root, num_tokens=3, batch_size=2, cache_dir=cache)
    data.setup()
    assert lines(data, "validation") == ["article 0", "article 10", "article 20"]
    assert sorted(lines(data, "train") + lines(data, "validation")) == sorted(ARTICLES["train"])
    assert lines(data, "test") == ARTICLES["test"]
    assert [data.num_lines(split) for split in ("train", "validation", "test")] == [22, 3, 2]
    assert data.decode(data.tokens("train")[:6]) == "article 1\narticle 2\n"


def test_real_articles(cache):
    path = Path(os.environ.get("ATTNSWAP_DATA", "/nonexistent"))
    if not (path / "ag_news" / "data").is_dir():
        pytest.skip("AG News is not under $ATTNSWAP_DATA")
    data = AGNewsDataModule(root=path, cache_dir=cache)
    assert data.num_lines("test") == 7600
    assert len(lines(data, "validation")) == data.num_lines("validation")
    assert all(text.strip() for text in lines(data, "validation"))


def test_a_missing_file_is_named_and_downloaded_where_asked(root, cache, monkeypatch):
    calls = []

    def load_dataset(repository, name):
        calls.append((repository, name))
        return {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in ARTICLES.items()}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (root / "ag_news" / "data" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"test-00000-of-00001\.parquet is missing.*ag_news.*download=True"):
        AGNewsDataModule(root=root, cache_dir=cache).setup()
    assert not calls
    for _ in range(2):
        data = AGNewsDataModule(root=root.parent / "new", cache_dir=cache, download=True)
        data.setup()
    assert calls == [("fancyzhx/ag_news", "default")]
    assert lines(data, "test") == ARTICLES["test"]


def test_a_hub_that_cannot_be_read_leaves_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: 1 / 0)
    with pytest.raises(OSError, match=r"fancyzhx/ag_news .*ZeroDivisionError.*tree/main/data into .*ag_news/data"):
        AGNewsDataModule(root=tmp_path / "new", cache_dir=cache, download=True).setup()
    assert list(tmp_path.iterdir()) == []
