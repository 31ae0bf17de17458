"""Fetching data sets from the Hugging Face hub into files of its own layout."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def download_parquet(repository: str, name: str, folder: Path, splits: Sequence[str]) -> None:
    """Loads configuration `name` of `repository` and writes `SPLIT-00000-of-00001.parquet` files into `folder`.

    The files get their names when all are complete; folders that a failure would leave empty are taken away.

    Raises:
        OSError: `folder` cannot be written (found before anything is fetched), or the hub cannot be read; the text
            says what to do instead.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with _scratch(repository, folder) as scratch:
            loaded = _load(repository, name, folder)
            missing = [split for split in splits if not _is_whole(folder, split)]
            for split in missing:
                loaded[split].to_parquet(Path(scratch) / split)
            for split in missing:
                os.replace(Path(scratch) / split, folder / f"{split}-00000-of-00001.parquet")
    except BaseException:
        _remove_empty(made)
        raise


def _scratch(repository: str, folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".download-", dir=folder)
    except OSError as error:
        raise OSError(
            f"{repository} cannot be downloaded to {folder} ({error.strerror}): "
            "give a writable folder as root=... or in $ATTNSWAP_DATA"
        ) from error


def _load(repository: str, name: str, folder: Path) -> Any:
    import datasets

    try:
        return datasets.load_dataset(repository, name)
    except Exception as error:  # of the hub's client, its transport or the file system
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise OSError(
            f"{repository} ({name}) could not be fetched from the Hugging Face hub ({reason}). Check the network and "
            "$HF_HUB_OFFLINE; or put the parquet files of "
            f"https://huggingface.co/datasets/{repository}/tree/main/{folder.name} into {folder}, "
            "or name another folder as root=... or in $ATTNSWAP_DATA"
        ) from error


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove those that are there and empty, the deepest given first."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def _is_whole(folder: Path, split: str) -> bool:
    try:
        return bool(find_shards(folder, split))
    except FileNotFoundError:
        return False


def find_shards(folder: Path, split: str) -> list[Path]:
    """The files `SPLIT-XXXXX-of-YYYYY.parquet` of a split in order; empty where there is none.

    Raises:
        FileNotFoundError: a file of the set is missing.
    """
    pattern = re.compile(rf"{re.escape(split)}-\d{{5}}-of-(\d{{5}})\.parquet")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    totals = {int(match[1]) for match in map(pattern.fullmatch, names) if match}
    if not totals:
        return []
    files = [folder / f"{split}-{index:05d}-of-{max(totals):05d}.parquet" for index in range(max(totals))]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} is missing ({len(missing)} of {len(files)} files of the split are): fetch it again"
        )
    return files


def count_rows(path: Path) -> int:
    """The number of rows of the file."""
    with _opened(path) as file:
        return file.metadata.num_rows


def read_column(path: Path, column: str, rows: int) -> Iterator[list[Any]]:
    """The strings of `column` in lists of at most `rows`.

    Raises:
        ValueError: the file is no whole parquet file, has no such column, or that holds something else than strings.
    """
    import pyarrow

    with _opened(path) as file:
        _check_columns(path, file, [column])
        kind = file.schema_arrow.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ValueError(f"{path} has {kind} in the column {column!r}: strings are needed")
        for batch in file.iter_batches(rows, columns=[column]):
            values = batch.column(column)
            if values.null_count:
                raise ValueError(f"{path} has {values.null_count} empty (null) values in {column!r}: none is allowed")
            yield values.to_pylist()


def read_rows(path: Path, columns: Sequence[str], rows: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of `columns` as dicts, in lists of at most `rows`.

    Raises:
        ValueError: the file is no whole parquet file, or lacks a column.
    """
    with _opened(path) as file:
        _check_columns(path, file, columns)
        for batch in file.iter_batches(rows, columns=list(columns)):
            yield batch.to_pylist()


def _check_columns(path: Path, file: Any, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in file.schema_arrow.names:
            raise ValueError(f"{path} has the columns {file.schema_arrow.names}: {column!r} is needed")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file; what goes wrong with its bytes in the block names it."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        raise ValueError(f"{path} is no whole parquet file ({error}): put an intact copy in its place") from error
