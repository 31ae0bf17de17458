"""Paired differences with their intervals, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def draw_forest(axes: Any, rows: Sequence[Any], ink: str = "black") -> list[Any]:
    """Draw the difference of each row of a summary with its 95% interval, and a line at zero; return the points.

    Args:
        axes: of matplotlib.
        rows: with `config`, `reference`, `difference`, `low` and `high`, which are finite.
        ink: the color.
    """
    points = []
    for place, row in enumerate(rows):
        interval = [[row.difference - row.low], [row.high - row.difference]]
        axes.errorbar([row.difference], [place], xerr=interval, fmt="none", ecolor=ink, capsize=3)
        points += axes.plot([row.difference], [place], "o", color=ink)
    axes.axvline(0.0, color=ink, linewidth=0.8, linestyle="--")
    names = (f"{row.config} - {row.reference}" for row in rows)  # of folders too, which may be no Unicode
    axes.set_yticks(range(len(rows)), [name.encode(errors="backslashreplace").decode() for name in names])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("difference")
    axes.spines[["top", "right"]].set_visible(False)
    return points
