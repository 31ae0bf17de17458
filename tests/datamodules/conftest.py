import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SPLITS = ("train", "validation", "test")
LINES = {
    "train": ["", " = Title = \n", " the cat sat on the mat \n", " the dog <unk> \n"],
    "validation": [" the cat barks \n", ""],
    "test": [" a mat \n"],
}


def write_split(folder: Path, split: str, lines: list[str], shard: int = 0, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-{shard:05d}-of-{shards:05d}.parquet"
    pq.write_table(pa.table({"text": pa.array(lines, pa.string())}), path)
    return path


@pytest.fixture
def wikitext_root(tmp_path: Path) -> Path:
    """A tiny WikiText-2 in the hub's layout."""
    for split in SPLITS:
        write_split(tmp_path / "data" / "wikitext" / "wikitext-2-v1", split, LINES[split])
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


@pytest.fixture
def real_root() -> Path:
    root = Path(os.environ.get("ATTNSWAP_DATA", "/nonexistent"))
    if not (root / "wikitext" / "wikitext-2-v1").is_dir():
        pytest.skip("WikiText-2 is not under $ATTNSWAP_DATA")
    return root


@pytest.fixture
def python_folder(tmp_path: Path) -> Path:
    """Twenty small Python files."""
    folder = tmp_path / "source"
    folder.mkdir()
    for index in range(20):
        (folder / f"module_{index}.py").write_text(f"def function_{index}(x):\n    return x + {index}\n")
    return folder


@pytest.fixture
def contents() -> Callable[[Path], set[str]]:
    """The files below a folder, lock files left out."""

    def listed(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix != ".lock"}

    return listed
