"""Raw tables: a CSV file packed into Parquet, exactly, and back."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from docs.pages.errors import PageError

Record = TypeVar("Record")


def pack(path: Path) -> Path:
    """Write a CSV file as Parquet beside it, and remove it; `csv_of` gives it back.

    Raises:
        PageError: the table has two columns of one name, or a row of another length.
    """
    table = _of_csv(path)
    packed = path.with_suffix(".parquet")
    pq.write_table(table, packed, compression="zstd", compression_level=19)
    if _lines(path) != [*csv.reader(io.StringIO(csv_of(packed)))]:
        packed.unlink()
        raise PageError(f"{path} does not come back from Parquet as it was")
    path.unlink()
    return packed


def _lines(path: Path) -> list[list[str]]:
    return [*csv.reader(io.StringIO(path.read_text(encoding="utf-8")))]


def _of_csv(path: Path) -> pa.Table:
    head, *rows = _lines(path)
    if len(set(head)) < len(head) or any(len(row) != len(head) for row in rows):
        raise PageError(f"{path} has a column twice, or a row that is longer or shorter than its head")
    columns = zip(*rows, strict=True) if rows else [()] * len(head)
    return pa.table({name: _column(texts) for name, texts in zip(head, columns, strict=True)})


def _column(texts: Sequence[str]) -> pa.Array:
    """Numbers where every text is how Python writes its number, else the texts; an empty cell among numbers is null."""
    kinds: list[tuple[Callable[[str], Any], pa.DataType]] = [
        (int, pa.int64()),
        (float, pa.float64()),
        (lambda text: {"True": True, "False": False}.get(text), pa.bool_()),
    ]
    for kind, typed in kinds:
        try:
            values = [None if text == "" else kind(text) for text in texts]
        except ValueError:
            continue
        if any(texts) and all(text in ("", str(value)) for text, value in zip(texts, values, strict=True)):
            return pa.array(values, typed)
    return pa.array(texts, pa.string())


def read(path: Path) -> pa.Table:
    """A raw table; where a CSV file is beside it, which is newer and not packed yet, that.

    Raises:
        PageError: there is none, or it is damaged.
    """
    if (unpacked := path.with_suffix(".csv")).is_file():
        return _of_csv(unpacked)
    if not path.is_file():
        raise PageError(f"{path} is missing, and a page is made from it")
    try:
        return pq.ParquetFile(path).read()  # without pandas, which the other way imports
    except pa.ArrowException as error:
        raise PageError(f"{path} is damaged ({error})") from error


def csv_of(path: Path) -> str:
    """A raw table as CSV."""
    table, text = read(path), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    columns = [column.to_pylist() for column in table.columns]
    writer.writerows(["" if value is None else value for value in row] for row in zip_longest(*columns))
    return text.getvalue()


def records(path: Path, kind: type[Record]) -> list[Record]:
    """The rows of a raw table as dataclasses; an empty cell is the field's default.

    Raises:
        PageError: there is no such table, it has no rows, or a column is missing.
    """
    table = read(path)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        rows = [
            kind(**{key: value for key, value in row.items() if key in known and value is not None})
            for row in table.to_pylist()
        ]
    except TypeError as error:
        raise PageError(f"{path} is no table of {kind.__name__} ({error})") from error
    if not rows:
        raise PageError(f"{path} has no rows")
    return rows
