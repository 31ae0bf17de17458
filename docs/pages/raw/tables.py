"""CSV and JSON files that a page is made from, with errors that name the file and the line."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from docs.pages.errors import PageError

Record = TypeVar("Record")
_KINDS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        PageError: there is no such file.
    """
    with existing(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def existing(path: Path) -> Path:
    """The path of a file that is there.

    Raises:
        PageError: it is not.
    """
    if not path.is_file():
        raise PageError(f"{path} is missing, and a page is made from it")
    return path


def parsed(path: Path, parse: Callable[[dict[str, str]], Record]) -> list[Record]:
    """The rows of a CSV file, parsed.

    Raises:
        PageError: there is no such file, or a line that holds something else.
    """
    found = []
    for number, line in enumerate(read_csv(path), start=2):
        try:
            found.append(parse(line))
        except (KeyError, TypeError, ValueError) as error:
            raise PageError(f"{path}, line {number}, is damaged ({type(error).__name__}: {error})") from error
    return found


def read_records(path: Path, kind: type[Record], grid: Sequence[str] = ()) -> list[Record]:
    """The rows of a CSV file as dataclasses of numbers, texts and truths.

    Args:
        path: of the file.
        kind: the dataclass.
        grid: fields of which each combination of values has one row, and whose table has finite numbers alone.

    Raises:
        PageError: there is no such file, it has no rows, a line is damaged, or it is no such grid.
    """
    of = {field.name: _KINDS[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    found = parsed(path, lambda line: kind(**{key: of[key](value) for key, value in line.items()}))
    if not found:
        raise PageError(f"{path} has no rows")
    if grid:
        _check_grid(path, found, grid)
    return found


def _check_grid(path: Path, rows: Sequence[Any], grid: Sequence[str]) -> None:
    counted = Counter(tuple(getattr(row, name) for name in grid) for row in rows)
    for key in product(*(dict.fromkeys(values) for values in zip(*counted, strict=True))):
        if counted[key] != 1:
            place = ", ".join(f"{name} {value}" for name, value in zip(grid, key, strict=True))
            raise PageError(f"{path} has {counted[key]} rows of {place}, and should have one")
    for number, row in enumerate(rows, start=2):
        for name, value in vars(row).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise PageError(f"{path}, line {number}: {name} is {value}, which is no finite number")


def json_of(path: Path) -> Any:
    """What a JSON file holds; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
