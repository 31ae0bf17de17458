"""The measures of the kernel PCA reading, and what is written of them: a table, a figure, and a summary in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_tasks.intervals import mean_interval
from lightning_tasks.runs.safe_files import write_rows

if TYPE_CHECKING:
    from torch import Tensor

TABLE, FIGURE, SUMMARY = "kernel_pca.csv", "kernel_pca.png", "summary.md"
DRAWS, INTERVALS = "draws.csv", "intervals.csv"
ALL_LAYERS = "all layers"
# The largest means that the reproduction study reports.
PUBLISHED = {"matched_cosine": 0.32, "linear_cka": 0.11, "rbf_cka": 0.32}
VALUE_MEASURES = (
    *("direct_cosine", "signed_cosine", "matched_cosine", "linear_cka", "rbf_cka", "relative_error"),
    *("gamma_absolute", "gamma_relative", "eigen_residual"),
)
OWN, NOISE, LINEAR = "layer", "random values", "random linear map"
STYLES = {
    "layer": {"color": "#0072b2", "marker": "o"},
    "random values": {"color": "0.5", "marker": "x", "linestyle": ":"},
    "random linear map": {"color": "#009e73", "marker": "+", "linestyle": ":"},
}


@dataclass(frozen=True)
class Row:
    """The measures of one head on one sample; nan where the layer is causal or masked (no V̂ is defined there).

    Args:
        layer: name of the layer.
        head: its number.
        sample: its number.
        values: "layer" for its own, else the control's name.
    """

    layer: str
    head: int
    sample: int
    values: str
    signed_loss: float
    absolute_loss: float
    phi: float
    h: float
    direct_cosine: float = math.nan
    signed_cosine: float = math.nan
    matched_cosine: float = math.nan
    linear_cka: float = math.nan
    rbf_cka: float = math.nan
    relative_error: float = math.nan
    gamma_absolute: float = math.nan
    gamma_relative: float = math.nan
    eigen_residual: float = math.nan


@dataclass(frozen=True)
class Draw:
    """The means over heads and samples of a layer's own values, or of one draw of a control."""

    layer: str
    values: str
    draw: int
    direct_cosine: float
    signed_cosine: float
    matched_cosine: float
    linear_cka: float
    rbf_cka: float
    relative_error: float
    gamma_absolute: float
    gamma_relative: float
    eigen_residual: float


def mean_draw(layer: str, values: str, draw: int, found: Mapping[str, Tensor]) -> Draw:
    """The means of measures ``[B, H]``."""
    return Draw(layer, values, draw, **{name: float(each.mean()) for name, each in found.items()})


@dataclass(frozen=True)
class Interval:
    """A control's mean over draws of a measure's mean over heads and samples, beside that of the layer's own values.

    Args:
        layer: name of the layer, or all layers.
        measure: its name.
        own: of the layer's own values.
        values: the control's name.
        mean: over draws.
        low, high: Student's interval of it.
        least, most: of the draws.
        below: how many draws are below ``own``.
        draws: how many there are.
    """

    layer: str
    measure: str
    own: float
    values: str
    mean: float
    low: float
    high: float
    least: float
    most: float
    below: int
    draws: int


def intervals(drawn: Sequence[Draw]) -> list[Interval]:
    """For each layer and all of them, each measure and each control; none where a control has one draw."""
    layers = list(dict.fromkeys(each.layer for each in drawn))
    places = [*((layer, [layer]) for layer in layers), *([(ALL_LAYERS, layers)] if len(layers) > 1 else [])]
    found = []
    for place, among in places:
        for measure in VALUE_MEASURES:
            own = _over_layers(drawn, among, OWN, measure)
            for kind in (LINEAR, NOISE):
                values = _over_layers(drawn, among, kind, measure)
                if len(values) < 2:
                    continue
                low, high = mean_interval(values)
                below = sum(value < own[0] for value in values)
                parts = (float(np.mean(values)), low, high, min(values), max(values), below, len(values))
                found.append(Interval(place, measure, own[0], kind, *parts))
    return found


def _over_layers(drawn: Sequence[Draw], layers: Sequence[str], kind: str, measure: str) -> list[float]:
    """The means over these layers for each draw that all of them have."""
    by_draw: dict[int, list[float]] = {}
    for each in drawn:
        if each.values == kind and each.layer in layers:
            by_draw.setdefault(each.draw, []).append(getattr(each, measure))
    return [float(np.mean(values)) for values in by_draw.values() if len(values) == len(layers)]


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([getattr(row, name) for row in rows]))


def _interval_lines(drawn: Sequence[Draw]) -> list[str]:
    """The table of intervals."""
    found = intervals(drawn)
    if not found:
        return []
    lines = [
        "",
        f"Controls over {found[0].draws} draws: mean [95% Student's interval of the mean over draws]; of the draws, so",
        "many are below the layer's own value.",
        "",
        "| layer | measure | own | random linear map | below own | random values | below own |",
        "|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    own = {(each.layer, each.measure): f"{each.own:.3g}" for each in found}
    for each in found:
        row = cells.setdefault((each.layer, each.measure), [])
        if each.values == NOISE and not row:
            row += ["", ""]  # the layer's input was not seen
        row += [f"{each.mean:.3g} [{each.low:.3g}, {each.high:.3g}]", f"{each.below} of {each.draws}"]
    for key, row in cells.items():
        lines.append(f"| {key[0]} | {key[1].replace('_', ' ')} | {own[key]} | {' | '.join(row)} |")
    return lines


def summary(rows: Sequence[Row], head: str, drawn: Sequence[Draw] = ()) -> str:
    """Means over heads and samples a layer, the controls beside them, as Markdown."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    published = ", ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    lines = [
        head,
        "",
        "Means over heads and samples; in brackets the controls: random values of the same size, and those of a random",
        "linear map of the layer's input. V̂ has eigenvectors of unit norm, whose signs are arbitrary: the direct",
        "cosine depends on them, the signed one has the best. The largest that the reproduction study found:",
        f"{published}.",
        "",
    ]
    defined = [layer for layer in layers if any(row.layer == layer and row.values != OWN for row in rows)]
    if defined:
        lines.append(f"| layer | {' | '.join(name.replace('_', ' ') for name in VALUE_MEASURES)} |")
        lines.append("|---" * (len(VALUE_MEASURES) + 1) + "|")
    for layer in defined:
        kinds = [[row for row in rows if row.layer == layer and row.values == kind] for kind in (OWN, NOISE, LINEAR)]
        means = [[f"{_mean(kind, name):.3g}" for kind in kinds if kind] for name in VALUE_MEASURES]
        cells = [f"{own} ({', '.join(others)})" for own, *others in means]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    lines += _interval_lines(drawn)
    if undefined := [layer for layer in layers if layer not in defined]:
        lines += ["", f"Causal, masked or with a position bias, so that V̂ is not defined: {', '.join(undefined)}."]
    lines += [
        "",
        "Projection loss: ‖φ(q)‖² - ‖h‖², mean over tokens.",
        "",
        "| layer | signed | absolute | ‖φ(q)‖² | ‖h‖² | log10 of ‖h‖²/‖φ(q)‖² |",
        "|---|---|---|---|---|---|",
    ]
    for layer in layers:
        own = [row for row in rows if row.layer == layer and row.values == OWN]
        cells = [f"{_mean(own, name):.3g}" for name in ("signed_loss", "absolute_loss", "phi", "h")]
        ratio = _mean(own, "h") / max(_mean(own, "phi"), 1e-300)
        lines.append(f"| {layer} | {' | '.join(cells)} | {math.log10(ratio) if ratio > 0 else -math.inf:.1f} |")
    return "\n".join([*lines, ""])


def write_report(rows: Sequence[Row], head: str, folder: Path, drawn: Sequence[Draw] = ()) -> str:
    """Write table, figure and summary, and draws and their intervals, if given; the text of the summary."""
    if drawn:
        write_rows(folder / DRAWS, [field.name for field in fields(Draw)], map(asdict, drawn))
        write_rows(folder / INTERVALS, [field.name for field in fields(Interval)], map(asdict, intervals(drawn)))
    write_rows(folder / TABLE, [field.name for field in fields(Row)], map(asdict, rows))
    draw(folder / FIGURE, layer_means(rows), PUBLISHED)
    text = summary(rows, head, drawn)
    (folder / SUMMARY).write_text(text, encoding="utf-8")
    return text


def layer_means(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """By kind of values, then by measure that was published: a mean for each layer."""
    kinds = [kind for kind in (OWN, NOISE, LINEAR) if any(row.values == kind for row in rows)]
    defined = any(kind != OWN for kind in kinds)
    return {kind: {name: _layer_means(rows, kind, name) for name in PUBLISHED if defined} for kind in kinds}


def _layer_means(rows: Sequence[Row], kind: str, name: str) -> list[float]:
    layers = dict.fromkeys(row.layer for row in rows)
    groups = ([row for row in rows if row.layer == layer and row.values == kind] for layer in layers)
    return [_mean(group, name) if group else math.nan for group in groups]


def draw(path: Path, means: Mapping[str, Mapping[str, Sequence[float]]], published: Mapping[str, float]) -> None:
    """Write the figure.

    Args:
        path: the file.
        means: by kind of values, then by measure: one mean per layer.
        published: by measure, the largest that was published.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.6 * len(published), 3.2), layout="constrained")
    for axes, (measure, largest) in zip(figure.subplots(1, len(published)), published.items(), strict=True):
        for kind, found in means.items():
            values = list(found.get(measure, ()))
            axes.plot(range(len(values)), values, label=kind, **STYLES[kind])
        axes.axhline(largest, color="#d55e00", linewidth=1, linestyle="--", label="largest published")
        axes.axhline(1, color="black", linewidth=0.8, label="what the reading predicts")
        axes.set_ylim(-0.05, 1.08)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(measure.replace("_", " "), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize="small", frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    figure.savefig(path, dpi=110, format="png")
