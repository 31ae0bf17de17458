"""Files in the folders of runs and comparisons: data of anybody's, inside their folder and of a bounded size.

A folder may come from somebody else, and what is read of it ends up in a page that is passed on. So a symbolic link
that leads out of the folder is refused on reading, and replaced on writing.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_tasks.errors import UsageError
from lightning_tasks.json_values import list_of, texts_of

MOST_TABLE_BYTES = 1 << 28
MOST_SETTINGS_BYTES = 1 << 20
_MOST_STEPS = 2**53
_CELL = ("config", "seed", "rows")
_TEXTS = {"config", "fingerprint", "initial_weights", "training_data", "stopped"}


def refuse_foreign(path: Path, folder: Path, most_bytes: int = MOST_TABLE_BYTES) -> None:
    """Check that a file lies in `folder` when links are followed, is a plain file and not too large to be read.

    Raises:
        UsageError: it is none of these.
    """
    try:
        resolved = path.resolve(strict=True)
        inside, size = resolved.is_relative_to(folder.resolve()), resolved.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not inside:
        raise UsageError(f"{path} is a link out of {folder}, to {resolved}: put a copy of the file in its place")
    if not resolved.is_file():
        raise UsageError(f"{path} is no file; remove it")
    if size > most_bytes:
        raise UsageError(f"{path} has {size:,} bytes, and at most {most_bytes:,} are read of such a file")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place once it is written; a link there is replaced.

    Of several commands that write it at once, the last one counts.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_rows(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV table of these columns, whole or not at all."""
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def whole_lines(file: Iterable[str]) -> Iterator[str]:
    """The lines of a table; a last one that has no end is left out: it was cut, and so may be its last number."""
    return (line for line in file if line.endswith(("\n", "\r")))


def read_result(path: Path, needed: tuple[str, ...] = _CELL) -> dict[str, Any]:
    """The result of a cell of a comparison.

    Raises:
        UsageError: the file is damaged, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found.keys() >= set(needed):
            raise TypeError(f"it holds no result, which has {', '.join(needed)}")
        for key in found.keys() & _TEXTS:
            if not isinstance(found[key], str):
                raise TypeError(f"{key} is {type(found[key]).__name__}, and a text is needed")
            found[key].encode()  # no half of a surrogate pair
        if "seed" in found and type(found["seed"]) is not int:
            raise TypeError(f"seed is {found['seed']!r}, and an integer is needed")
        if type(found.get("seconds", 0.0)) not in (int, float):
            raise TypeError(f"seconds is {type(found['seconds']).__name__}, and a number is needed")
        float(found.get("seconds", 0.0))  # of a whole number: it may be too large
        if not isinstance(found["rows"], list):
            raise TypeError(f"rows are {type(found['rows']).__name__}, and a list is needed")
        found["rows"] = [_row(each) for each in found["rows"]]
        found["runs"] = list_of(found.get("runs", []), str)
        if found.get("sources") is not None:
            found["sources"] = texts_of(found["sources"])
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); delete it, and its cell is run again") from error
    return found


def _row(row: Any) -> dict[str, Any]:
    """A logged value: its step, its metric, and a float, as tables and figures take no whole number of any size.

    Raises:
        TypeError: it is something else.
        ValueError: the step is more than any run takes, or the metric cannot be written.
        OverflowError: the value is a whole number that no float holds.
    """
    if not isinstance(row, dict) or row.keys() != {"step", "metric", "value"}:
        raise TypeError("a row has other keys than step, metric and value")
    if type(row["step"]) is not int or type(row["value"]) not in (int, float) or type(row["metric"]) is not str:
        raise TypeError(f"a row has the types {', '.join(f'{key} {type(row[key]).__name__}' for key in row)}")
    row["metric"].encode()
    as_step(row["step"])
    return {**row, "value": float(row["value"])}


def as_step(given: str | int, what: str = "it") -> int:
    """A step of what is called so in the error.

    Raises:
        ValueError: it is no whole number, or more than any run takes.
    """
    if abs(step := int(given)) > _MOST_STEPS:
        raise ValueError(f"{what} has the step {given}, more than any run takes")
    return step
