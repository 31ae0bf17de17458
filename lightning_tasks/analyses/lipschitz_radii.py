"""What is written of local Lipschitz constants over the radius R of the tokens: a table, a figure and a summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tasks.analyses.lipschitz_report import COLORS, FIGURE, SUMMARY, Fit, Row, fit_slope, log_scales
from lightning_tasks.runs.safe_files import write_rows

RADII = "radii.csv"
COLUMNS = (
    *("layer", "input", "length", "sequence", "radius", "value", "bound"),
    *("residual", "converged", "iterations", "seconds"),
)
_SHOWN_RADII = 8
Bounds = Mapping[tuple[str, float], float]
"""By layer and radius; nan where the bound does not cover the layer."""


def write_radii(rows: Sequence[Row], bounds: Bounds, output: Path) -> None:
    """Write the rows as CSV, each with the bound of its radius."""
    found = (asdict(row) | {"bound": bounds[row.layer, row.radius]} for row in rows)
    write_rows(output / RADII, COLUMNS, found)


def write_radii_report(rows: Sequence[Row], bounds: Bounds, head: str, output: Path) -> str:
    """Write table, figure and summary of what is measured so far; the text of the summary."""
    write_radii(rows, bounds, output)
    draw_radii(rows, bounds).savefig(output / FIGURE, dpi=110, format="png")
    text = radii_summary(rows, bounds, head)
    (output / SUMMARY).write_text(text, encoding="utf-8")
    return text


def fit_of_radii(rows: Sequence[Row]) -> Fit:
    """The slope of the logarithm of the constant over that of R."""
    return fit_slope([row.radius for row in rows], [row.value for row in rows], [row.sequence for row in rows])


def radii_summary(rows: Sequence[Row], bounds: Bounds, head: str) -> str:
    """Slopes over R, and mean constants beside the bound, as Markdown."""
    radii = sorted({row.radius for row in rows})
    shown = [
        radii[place] for place in np.linspace(0, len(radii) - 1, min(_SHOWN_RADII, len(radii))).round().astype(int)
    ]
    lines = [
        head,
        "",
        "All tokens of a layer's input are multiplied by one number, so that the largest has norm R: our reading of",
        "the paper's regime of large R at a fixed n. In the table: mean ‖D_x f‖₂ over sequences, and in brackets the",
        "bound on the ball of radius R for that many tokens (none where it does not cover the layer).",
        "",
        f"| layer | input | slope over R | {' | '.join(f'R = {radius:g}' for radius in shown)} |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for (layer, kind), found in groups(rows).items():
        cells = [_cell([row.value for row in found if row.radius == radius], bounds[layer, radius]) for radius in shown]
        lines.append(f"| {layer} | {kind} | {fit_of_radii(found)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by layer and kind of input."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.layer, row.input), []).append(row)
    return found


def _cell(values: Sequence[float], bound: float) -> str:
    if not values:
        return ""
    return f"{np.mean(values):.3g}" + ("" if math.isnan(bound) else f" ({bound:.3g})")


def draw_radii(rows: Sequence[Row], bounds: Bounds) -> Any:
    """The figure: constants of every sequence over R, a panel per layer, and the bound above them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    layers = list(dict.fromkeys(row.layer for row in rows))
    columns = min(4, len(layers))
    height = -(-len(layers) // columns)
    figure = Figure(figsize=(1 + 3.4 * columns, 0.6 + 3.0 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    for axes, layer in zip(panels, layers, strict=False):
        kinds = {kind: found for (name, kind), found in groups(rows).items() if name == layer}
        for color, (kind, found) in zip(COLORS, kinds.items(), strict=False):
            radii, values = [row.radius for row in found], [row.value for row in found]
            axes.plot(radii, values, ".", color=color, alpha=0.4, markersize=5, markeredgewidth=0)
            axes.plot([], [], ".", color=color, label=f"{kind}: slope {fit_of_radii(found)}")
        line = sorted((radius, bound) for (name, radius), bound in bounds.items() if name == layer)
        axes.plot(*zip(*line, strict=True), color="black", linewidth=1, linestyle="--", label="bound")
        log_scales(axes)
        axes.yaxis.set_major_locator(LogLocator())
        axes.set_title(layer, loc="left", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="x-small", frameon=False, loc="upper left")
    figure.supxlabel("largest norm R of a token")
    figure.supylabel("local Lipschitz constant")
    return figure
