"""The rows of local Lipschitz constants, and what is written of them: a table, a figure, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tasks.runs.safe_files import write_rows

TABLE, FIGURE, SUMMARY = "lipschitz.csv", "lipschitz.png", "summary.md"
_SHOWN_LENGTHS = 8
_FEW_CLUSTERS = 5
Points = tuple[list[int], list[float]]
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_LEGEND = 0.4  # its height, in that of the points
GUIDES = {"$n^{1/4}$": (0.25, ":"), "$n^{1/2}$": (0.5, "--")}


@dataclass(frozen=True)
class Row:
    """One local Lipschitz constant.

    Args:
        layer: name of the layer.
        input: "text", "images" or "adversarial".
        length: n, tokens.
        sequence: its number, that of a part of the text, in which shorter sequences begin longer ones (or come before
            them, if disjoint); all windows of an image have the image's.
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
    write_rows(path, [field.name for field in fields(Row)], map(asdict, rows))


def fit_of(rows: Sequence[Row], name: str = "value") -> Fit:
    """The slope of the logarithms of a quantity over those of the lengths."""
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
            fit, late = fit_of(found, "value"), sum(not row.converged for row in found)
            lines.append(f"| {layer} | {kind} | {fit} | {fit.points} | {late} | {fit_of(found, 'radius')} |")
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
    """Write table, figure and summary of what is measured so far; the text of the summary."""
    write_table(rows, output / TABLE)
    draw(output / FIGURE, panels(rows))
    text = summary(rows, head)
    (output / SUMMARY).write_text(text, encoding="utf-8")
    return text


def panels(rows: Sequence[Row]) -> dict[str, dict[str, tuple[Points, Fit]]]:
    """What the figure shows by layer and kind of input: lengths and values, and their fit."""
    return {
        layer: {
            kind: (([row.length for row in found], [row.value for row in found]), fit_of(found, "value"))
            for kind, found in kinds.items()
        }
        for layer, kinds in _groups(rows).items()
    }


@dataclass(frozen=True)
class Fit:
    """value ≈ exp(intercept) · length^slope, by least squares of the logarithms.

    Args:
        slope, intercept: nan where there are fewer than two lengths.
        low, high: interval of the slope; nan where there are fewer than two clusters.
        points: how many were fitted.
    """

    slope: float
    intercept: float
    low: float
    high: float
    points: int

    def __str__(self) -> str:
        if math.isnan(self.slope):
            return "not fitted"
        return f"{self.slope:.3f}" + ("" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


def fit_slope(
    lengths: Sequence[float],
    values: Sequence[float],
    clusters: Sequence[int],
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Fit:
    """Fit, and the percentile interval of a bootstrap that draws whole clusters (sequences) with replacement.

    Points that are not positive are left out.
    """
    kept = np.asarray(values, dtype=float) > 0
    x, y = (np.log(np.asarray(each, dtype=float)[kept]) for each in (lengths, values))
    if len(np.unique(x)) < 2:
        return Fit(math.nan, math.nan, math.nan, math.nan, len(x))
    middle = x.mean()
    x = x - middle
    _, which = np.unique(np.asarray(clusters)[kept], return_inverse=True)
    sums = np.stack(
        [np.bincount(which, weights=part) for part in (np.ones_like(x), x, y, x * x, x * y)], axis=-1
    )  # [clusters, 5]
    slope, intercept = _least_squares(sums.sum(0))
    low = high = math.nan
    if len(sums) > 1:
        drawn = np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))
        slopes, _ = _least_squares(sums[drawn].sum(1))
        low, high = np.nanquantile(slopes, [(1 - level) / 2, (1 + level) / 2])
    return Fit(float(slope), float(intercept - slope * middle), float(low), float(high), len(x))


def _least_squares(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and intercept from the sums of 1, x, y, x² and xy, ``[..., 5]``."""
    count, x, y, xx, xy = np.moveaxis(sums, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):  # a draw may hold one length only
        slope = (count * xy - x * y) / (count * xx - x * x)
    return slope, (y - slope * x) / count


def draw(path: Path, panels: Mapping[str, Mapping[str, tuple[Points, Fit]]]) -> None:
    """Write the figure of :func:`drawn`."""
    drawn(panels).savefig(path, dpi=110, format="png")


def drawn(panels: Mapping[str, Mapping[str, tuple[Points, Fit]]]) -> Any:
    """The figure.

    Args:
        panels: by layer, then by kind of input: (lengths, values) of every sequence, and their fit.
    """
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 3.4 * columns, 0.6 + 3.0 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    for axes, (layer, kinds) in zip(all_axes, panels.items(), strict=False):
        for color, (kind, (points, fit)) in zip(COLORS, kinds.items(), strict=False):
            _draw_kind(axes, color, kind, points, fit)
        for place, (points, fit) in enumerate(kinds.values()):
            _draw_guides(axes, points, fit, named=place == 0)
        log_scales(axes)
        axes.set_title(layer, loc="left", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** _LEGEND)
        axes.legend(fontsize="x-small", frameon=False, loc="upper left")
    figure.supxlabel("tokens n")
    figure.supylabel("local Lipschitz constant")
    return figure


def log_scales(axes: Any) -> None:
    """Logarithmic axes with few ticks, written out: 4, 8, 16 and 1, 2, 5."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())


def _draw_kind(axes: Any, color: str, kind: str, points: Points, fit: Fit) -> None:
    lengths, values = points
    axes.plot(lengths, values, ".", color=color, alpha=0.4, markersize=5, markeredgewidth=0)
    if math.isnan(fit.slope):
        axes.plot([], [], ".", color=color, label=kind)
        return
    ends = np.array([min(lengths), max(lengths)], dtype=float)
    axes.plot(ends, math.exp(fit.intercept) * ends**fit.slope, color=color, linewidth=1.8, label=f"{kind}: {fit}")


def _draw_guides(axes: Any, points: Points, fit: Fit, named: bool) -> None:
    """The slopes that the paper found, through the middle of a fit."""
    if math.isnan(fit.slope):
        return
    ends = np.array([min(points[0]), max(points[0])], dtype=float)
    middle = math.sqrt(ends[0] * ends[1])
    height = math.exp(fit.intercept) * middle**fit.slope
    for name, (slope, style) in GUIDES.items():
        axes.plot(
            ends,
            height * (ends / middle) ** slope,
            color="0.5",
            linewidth=0.9,
            linestyle=style,
            label=name if named else None,
        )
