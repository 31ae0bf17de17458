"""The slope of log value over log length, with an interval that knows that lengths of one sequence belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
