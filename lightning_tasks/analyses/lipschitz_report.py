"""The rows of local Lipschitz constants, and what is written of them: a table, a picture, and a summary in Markdown."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lightning_tasks.analyses.lipschitz_figure import Points, draw
from lightning_tasks.analyses.lipschitz_fit import Fit, fit_slope

TABLE, FIGURE, SUMMARY = "lipschitz.csv", "lipschitz.png", "summary.md"
_SHOWN_LENGTHS = 8
_FEW_CLUSTERS = 5


@dataclass(frozen=True)
class Row:
    """One local Lipschitz constant.

    Args:
        layer: name of the layer.
        input: "text", "pictures" or "adversarial".
        length: n, tokens.
        sequence: its number; a shorter sequence is the beginning of the longer one of this number, and all windows of
            a picture have the picture's.
        value: the largest singular value, from below.
        residual: relative to the value.
        converged: whether the residual is within the tolerance.
        iterations: of the batch.
        radius: R, the largest norm of a token at the layer's input.
        seconds: of the batch.
    """

    layer: str
    input: str
    length: int
    sequence: int
    value: float
    residual: float
    converged: bool
    iterations: int
    radius: float
    seconds: float = math.nan


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as CSV, whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    partial.replace(path)


def _fit(rows: Sequence[Row], name: str) -> Fit:
    values = [float(getattr(row, name)) for row in rows]
    return fit_slope([row.length for row in rows], values, [row.sequence for row in rows])


def _groups(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows by layer and kind of input."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.layer, {}).setdefault(row.input, []).append(row)
    return groups


def summary(rows: Sequence[Row], head: str) -> str:
    """Slopes a layer, and the token norm R over lengths, as Markdown."""
    groups = _groups(rows)
    lines = [
        head,
        "",
        "Slope of log ‖D_x f‖₂ over log n by least squares, [95% cluster bootstrap over sequences]. The paper found",
        "about n^{1/4} on real text and n^{1/2} for adversarial inputs. R: largest norm of a token at the layer's",
        "input, mean over sequences. Not converged: estimates from below.",
        *_few_clusters(rows),
        "",
        "| layer | input | slope | points | not converged | slope of R |",
        "|---|---|---|---|---|---|",
    ]
    for layer, kinds in groups.items():
        for kind, found in kinds.items():
            fit, late = _fit(found, "value"), sum(not row.converged for row in found)
            lines.append(f"| {layer} | {kind} | {fit} | {fit.points} | {late} | {_fit(found, 'radius')} |")
    lengths = sorted({row.length for row in rows})
    places = np.linspace(0, len(lengths) - 1, min(_SHOWN_LENGTHS, len(lengths))).round().astype(int)
    shown = [lengths[place] for place in places]
    lines += ["", f"| R, constant at n = | input | {' | '.join(map(str, shown))} |", "|---" * (len(shown) + 2) + "|"]
    for layer, kinds in groups.items():
        for kind, found in kinds.items():
            cells = [_means([row for row in found if row.length == length]) for length in shown]
            lines.append(f"| {layer} | {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _few_clusters(rows: Sequence[Row]) -> list[str]:
    """A line where the bootstrap has hardly anything to draw from."""
    count = len({row.sequence for row in rows})
    if count == 1:
        return ["There is one sequence only: the slopes have no interval."]
    if count < _FEW_CLUSTERS:
        return [f"The intervals rest on {count} clusters (sequences) only and are too narrow: give more --sequences."]
    return []


def _means(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    return f"{np.mean([row.radius for row in rows]):.3g}, {np.mean([row.value for row in rows]):.3g}"


def write_report(rows: Sequence[Row], head: str, output: Path) -> str:
    """Write table, picture and summary of what is measured so far; the text of the summary."""
    write_table(rows, output / TABLE)
    panels: dict[str, dict[str, tuple[Points, Fit]]] = {
        layer: {
            kind: (([row.length for row in found], [row.value for row in found]), _fit(found, "value"))
            for kind, found in kinds.items()
        }
        for layer, kinds in _groups(rows).items()
    }
    draw(output / FIGURE, panels)
    text = summary(rows, head)
    (output / SUMMARY).write_text(text, encoding="utf-8")
    return text
