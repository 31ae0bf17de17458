"""Local Lipschitz constants of attention: the slopes of their logarithms over those of the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.pages import tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import in_turn, least_to_most, markdown, number, significant
from lightning_tasks.analyses import lipschitz_report as report
from lightning_tasks.analyses.lipschitz_report import Fit, Row


@lru_cache
def _layers(path: Path) -> dict[tuple[str, str], list[Row]]:
    """The measurements in a folder by layer and kind of input."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in tables.records(path / "lipschitz.parquet", Row):
        found.setdefault((row.layer, row.input), []).append(row)
    return found


def _slope(fit: Fit, digits: int = 2) -> str:
    return f"{number(fit.slope, digits)} [{number(fit.low, digits)}, {number(fit.high, digits)}]"


def _mean(rows: list[Row], length: int) -> float:
    return fmean(row.value for row in rows if row.length == length)


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """`fits` gives slopes, of which `each`, `between`, `average` and `held` tell."""

    def fits(*places: str, kind: str = "text", least: int = 0, most: float = math.inf) -> list[Fit]:
        """The slopes of all layers of some folders, over lengths in a range."""
        kinds = [
            rows for place in places for (_, input_), rows in _layers(folder.path / place).items() if input_ == kind
        ]
        return [report.fit_of([row for row in rows if least <= row.length <= most]) for rows in kinds]

    def each(found: list[Fit]) -> str:
        """All of them with their intervals."""
        return in_turn(map(_slope, found))

    def between(found: list[Fit], digits: int = 2) -> str:
        """The least and the largest."""
        return least_to_most((fit.slope for fit in found), digits)

    def average(found: list[Fit]) -> str:
        """Their mean."""
        return number(fmean(fit.slope for fit in found), 2)

    def held(found: list[Fit], exponent: float) -> str:
        """How many of their intervals hold an exponent."""
        return f"{sum(fit.low <= exponent <= fit.high for fit in found)} of {len(found)}"

    def slopes() -> str:
        """All folders, layers and kinds of input: slopes, and mean constants at the least and the largest length."""
        lines = []
        for path in sorted(folder.path.glob("*/lipschitz.parquet")):
            for (layer, kind), rows in _layers(path.parent).items():
                ends = min(row.length for row in rows), max(row.length for row in rows)
                late = report.fit_of([row for row in rows if row.length >= 32])
                constants = " to ".join(significant(_mean(rows, length)) for length in ends)
                cells = [path.parent.name, layer, kind, _slope(report.fit_of(rows), 3), _slope(late, 3)]
                lines.append([*cells, f"{ends[0]} to {ends[1]}", constants])
        return markdown(["folder", "layer", "input", "slope [95%]", "from n = 32", "n", "constant"], lines)

    def measured(place: str) -> Figure:
        """The constants in a folder, their slopes, and those that the paper found."""
        panels = report.panels([row for rows in _layers(folder.path / place).values() for row in rows])
        data = {
            layer: {kind: [points, str(fit)] for kind, (points, fit) in kinds.items()}
            for layer, kinds in panels.items()
        }
        return Figure(lambda: report.drawn(panels), data, report)

    names = (fits, each, between, average, held, slopes, measured)
    return {word.__name__: word for word in names}
