"""Reading columns of a parquet file in bounded memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
