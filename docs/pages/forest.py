"""Paired differences to the reference, a line for each configuration, ordered by the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure


def draw_differences(*panels: tuple[Sequence[Mapping[str, Any]], str]) -> Figure:
    """Estimate and 95% interval of each difference; filled where the verdict holds after the correction.

    Args:
        panels: each of lines with ``name``, ``difference``, ``low``, ``high`` and ``holds``, and of a title, which
            says what differs from what, in which unit.
    """
    longest = max(len(lines) for lines, _ in panels)
    figure = Figure(figsize=(7 if len(panels) == 1 else 5.5 * len(panels), 1 + 0.22 * longest), layout="constrained")
    for axes, (lines, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        ordered = sorted(lines, key=lambda line: line["difference"])
        axes.axvline(0, color="0.6", linewidth=0.8)
        for place, line in enumerate(ordered):
            color = "C3" if line["holds"] else "0.45"
            axes.plot([line["low"], line["high"]], [place, place], color=color, linewidth=1.2)
            face = color if line["holds"] else "white"
            axes.plot(line["difference"], place, "o", color=color, markerfacecolor=face, markersize=4.5)
        axes.set_yticks(range(len(ordered)), [line["name"] for line in ordered], fontsize=8)
        axes.set_xlabel(title, fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure
