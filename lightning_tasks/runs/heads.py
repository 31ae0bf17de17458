"""The table of what was observed of each head: a row per step, name and layer, a column per head."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lightning_tasks.runs.metric_names import head_part
from lightning_tasks.runs.safe_files import as_step, whole_lines, write_rows

TABLE = "attention_heads.csv"
_MOST_MISSING = 100_000  # places of steps and layers, before those without a value are counted
# Steps, numbers of layers, and values [steps, layers, heads], nan where there is none.
History = tuple[list[int], list[int], np.ndarray]


def write_heads(path: Path, histories: Mapping[str, History], started: set[str], trains: bool = True) -> None:
    """Append values by name.

    Rows of a name that is not in ``started``, from the first step on that is written now, are of an earlier run and
    go: of one that is resumed here, or that was another. So no step is there twice. What does not train, as a
    validation with the logger of a fit, takes the place of its own steps alone.
    """
    new = {name: steps for name, (steps, *_) in histories.items() if name not in started}

    def stays(row: Mapping[str, str]) -> bool:
        steps, step = new.get(row["name"]), int(row["step"])
        return steps is None or (step < min(steps) if trains else step not in steps)

    heads = max(values.shape[2] for *_, values in histories.values())
    columns = ["step", "name", "layer", *map(head_part, range(heads))]
    if path.is_file() and new:
        _filter(path, columns, stays)
    is_new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(columns)
        for name, (steps, layers, values) in histories.items():
            for step, rows in zip(steps, values, strict=True):
                for layer, row in zip(layers, rows, strict=True):
                    writer.writerow([step, name, layer, *("" if np.isnan(one) else f"{one:.6g}" for one in row)])


def _filter(path: Path, columns: Sequence[str], keep: Callable[[dict[str, str]], bool]) -> None:
    """Write the table anew with the rows that are kept, of the same columns; without a model of other heads."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(whole_lines(file))
        rows = [row for row in reader if keep(row)] if reader.fieldnames == list(columns) else []
    write_rows(path, columns, rows)


def read_heads(path: Path) -> dict[str, History]:
    """What :func:`write_heads` wrote, by name; a last line that was cut is left out.

    Raises:
        ValueError: if it is another table, or one of very many steps and layers and hardly a value.
        KeyError: if it is another table.
    """
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(whole_lines(file))
        for row in lines:
            if None in row or None in row.values():
                raise ValueError(f"line {lines.line_num} has another number of values than there are columns")
            heads = [float(row[column] or "nan") for column in row if column.startswith("head_")]
            found.setdefault(row["name"], {})[as_step(row["step"]), int(row["layer"])] = heads
    return {name: _history(cells) for name, cells in found.items()}


def _history(cells: Mapping[tuple[int, int], Sequence[float]]) -> History:
    steps, layers = sorted({step for step, _ in cells}), sorted({layer for _, layer in cells})
    if len(steps) * len(layers) > max(_MOST_MISSING, 100 * len(cells)):
        raise ValueError(f"it has {len(steps):,} steps, {len(layers):,} layers and {len(cells):,} rows of one name")
    missing = [float("nan")] * len(next(iter(cells.values())))
    return steps, layers, np.array([[cells.get((step, layer), missing) for layer in layers] for step in steps])
