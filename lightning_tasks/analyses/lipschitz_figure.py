"""The picture of local Lipschitz constants over lengths: a log-log panel a layer, with the fitted lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tasks.analyses.lipschitz_fit import Fit

Points = tuple[list[int], list[float]]
COLORS = ("#0072b2", "#d55e00")
_LEGEND = 0.4  # its height, in that of the points
GUIDES = {"$n^{1/4}$": (0.25, ":"), "$n^{1/2}$": (0.5, "--")}


def draw(picture: Path, panels: Mapping[str, Mapping[str, tuple[Points, Fit]]]) -> None:
    """Write the picture.

    Args:
        picture: the file.
        panels: by layer, then by kind of input: (lengths, values) of every sequence, and their fit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 3.4 * columns, 0.6 + 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    for axes, (layer, kinds) in zip(all_axes, panels.items(), strict=False):
        for color, (kind, (points, fit)) in zip(COLORS, kinds.items(), strict=False):
            _draw_kind(axes, color, kind, points, fit)
        for place, (points, fit) in enumerate(kinds.values()):
            _draw_guides(axes, points, fit, named=place == 0)
        _log_scales(axes)
        axes.set_title(layer, loc="left", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** _LEGEND)
        axes.legend(fontsize="x-small", frameon=False, loc="upper left")
    figure.supxlabel("tokens n")
    figure.supylabel("local Lipschitz constant")
    figure.savefig(picture, dpi=110)


def _log_scales(axes: Any) -> None:
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
