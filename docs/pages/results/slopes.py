"""Measured local Lipschitz constants of a layer, and the slopes of their logarithms, for the page on smoothness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from docs.pages.errors import PageError
from docs.pages.numbers import number
from docs.pages.raw import Raw
from lightning_tasks.analyses import lipschitz_report as report
from lightning_tasks.analyses.lipschitz_report import Fit, Row

ADVERSARIAL, TEXT = "adversarial", "text"


def rows(raw: Raw, folder: str) -> list[Row]:
    """Every measurement of a folder."""
    return raw.records(f"{folder}/{report.TABLE}", Row)


def of_layer(raw: Raw, folder: str, layer: int, kind: str = TEXT, least: int = 0) -> list[Row]:
    """The measurements of a layer from a length on."""
    return [row for row in rows(raw, folder) if f".{layer}." in row.layer and row.input == kind and row.length >= least]


def fit(found: list[Row], name: str = "value") -> Fit:
    """The slope of the logarithms, and its interval.

    Raises:
        PageError: there is none, as of one sequence or one length.
    """
    fitted = report.fit_of(found, name)
    if not (math.isfinite(fitted.low) and math.isfinite(fitted.high)):
        layers = ", ".join(sorted({row.layer for row in found})) or "no layer"
        raise PageError(
            f"{report.TABLE}: the slope of {name} of {layers} has no interval: give two sequences and two lengths"
        )
    return fitted


def mean_at(found: list[Row], length: int, name: str = "value") -> float:
    """The mean over sequences.

    Raises:
        PageError: this length was not measured.
    """
    values = [getattr(row, name) for row in found if row.length == length]
    if not values:
        raise PageError(
            f"{report.TABLE} has no length {length}, and has {', '.join(map(str, lengths(found))) or 'none'}"
        )
    return float(np.mean(values))


def ends(found: list[Row], name: str) -> tuple[float, float]:
    """The means at the least and at the largest length.

    Raises:
        PageError: none was measured.
    """
    measured = lengths(found) or [0]
    return mean_at(found, measured[0], name), mean_at(found, measured[-1], name)


def slope(found: Fit, digits: int = 3) -> str:
    """The slope and its interval."""
    return f"{number(found.slope, digits)} [{number(found.low, digits)}, {number(found.high, digits)}]"


def lengths(found: list[Row]) -> list[int]:
    """Those that were measured, in their order."""
    return sorted({row.length for row in found})


def span(fits: Iterable[Fit]) -> str:
    """The least and the largest slope."""
    slopes = [each.slope for each in fits]
    return f"{number(min(slopes), 2)} to {number(max(slopes), 2)}"


def between(fits: Sequence[Fit]) -> str:
    """The least and the largest slope, and their mean."""
    return f"{span(fits)}, {number(float(np.mean([each.slope for each in fits])), 2)} in the mean"


def sides(fits: Sequence[Fit]) -> str:
    """How many intervals lie above 0, below it, and hold it."""
    above, below = sum(each.low > 0 for each in fits), sum(each.high < 0 for each in fits)
    return f"{above} lie above 0 and {below} below it; {len(fits) - above - below} of {len(fits)} hold it"


def held(fits: Sequence[Fit], exponent: float) -> int:
    """How many intervals hold an exponent."""
    return sum(each.low <= exponent <= each.high for each in fits)
