"""Paired differences: intervals over seeds and over images, whether they are none or small, what could be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_tasks.intervals import mean_interval

DRAWS = 2000
ROUNDING = 2.0**-24  # of a value in single precision, in which loggers keep it
_MOST_COUNTS = 1 << 22  # held at a time


def last_values(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, dict[int, float]]:
    """Value of `metric` at its last step, by configuration and seed."""
    last: dict[tuple[str, int], tuple[int, float]] = {}
    for row in rows:
        key = (row["config"], row["seed"])
        if row["metric"] == metric and row["step"] >= last.get(key, (-1, 0.0))[0]:
            last[key] = (row["step"], row["value"])
    values: dict[str, dict[int, float]] = {}
    for (config, seed), (_, value) in last.items():
        values.setdefault(config, {})[seed] = value
    return values


def paired_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t-interval of the mean of paired differences; two or more are needed."""
    # `ttest_rel(...).confidence_interval()` is the same interval, and warns of equal differences, which are a result.
    return mean_interval(differences, level)


def differ_alike(own: Sequence[float], other: Sequence[float]) -> bool:
    """Whether all pairs differ by one number, but for the rounding of what each logged to single precision.

    Of accuracies that are all one image apart, rounding is all the spread there is: a t-test would be sure of it.
    """
    values = np.asarray([own, other], dtype=float)
    difference, rounding = values[0] - values[1], ROUNDING * np.abs(values).sum(0)
    return bool((difference - rounding).max() <= (difference + rounding).min())


def minimum_detectable_effect(std: float, pairs: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest true mean difference that a two-sided paired t-test finds with probability `power`.

    `std` is the standard deviation of the differences. The probability that the t statistic is beyond its critical
    value is a mean over quantiles of the estimated deviation (scipy's non-central t gives nan for two pairs).
    """
    return 0.0 if std == 0.0 else _detectable_shift(pairs, power, alpha) * std / math.sqrt(pairs)


@lru_cache
def _detectable_shift(pairs: int, power: float, alpha: float) -> float:
    """The same, in standard deviations of the mean of the differences."""
    from scipy import optimize, special

    degrees = pairs - 1
    nodes, weights = np.polynomial.legendre.leggauss(200)
    estimates = np.sqrt(2 * special.gammaincinv(degrees / 2, (nodes + 1) / 2) / degrees)  # of a deviation
    limits = special.stdtrit(degrees, 1 - alpha / 2) * estimates

    def excess(shift: float) -> float:
        return float(weights @ (special.ndtr(shift - limits) + special.ndtr(-limits - shift)) / 2 - power)

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-14))


def paired_p(differences: Sequence[float]) -> float:
    """The two-sided p-value of Student's paired t-test; nan where all differences are equal."""
    return _p_above(np.abs(np.mean(differences)), differences) * 2


def p_of_interval(mean: float, low: float, high: float, pairs: int, level: float = 0.95) -> float:
    """The p-value of :func:`paired_p` from the interval of :func:`paired_interval`."""
    from scipy import special

    error = (high - low) / 2 / float(special.stdtrit(pairs - 1, (1 + level) / 2))
    return 2 * float(special.stdtr(pairs - 1, -abs(mean) / error)) if error > 0 else math.nan


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """The p-value of two one-sided t-tests that the mean difference is within ``margin`` of 0 (Schuirmann, 1987)."""
    mean = float(np.mean(differences))
    return max(_p_above(margin - mean, differences), _p_above(margin + mean, differences))


def _p_above(distance: float, differences: Sequence[float]) -> float:
    """Probability of a t statistic of at least that of a mean at this distance; nan without a spread."""
    from scipy import special

    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return float(special.stdtr(len(differences) - 1, -distance / error)) if error > 0 else math.nan


def holm(values: Sequence[float], family: int = 0) -> list[float]:
    """p-values corrected for the number of comparisons (Holm, 1979), in their order.

    nan stays, and counts as a comparison. There are `family` comparisons, where these are more than the p-values: of
    those without one, each may have the largest.
    """
    order = sorted((place for place, p in enumerate(values) if not math.isnan(p)), key=values.__getitem__)
    count = max(family, len(values))
    corrected, largest = [math.nan] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * values[place]))
        corrected[place] = largest
    return corrected


def resampled_sums(parts: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """The sums of as many images as there are, drawn with replacement, ``[draws, m]``.

    Equal numbers of images have equal draws, so that what is computed of several runs is paired.

    Args:
        parts: what each image adds, ``[images, m]``.
        draws: how often they are drawn.
        seed: of the generator.
    """
    images, generator = len(parts), np.random.default_rng(seed)
    values, sums = np.asarray(parts, dtype=np.float64), np.empty((draws, parts.shape[1]))
    chunk = max(1, _MOST_COUNTS // images)
    for first in range(0, draws, chunk):
        count = min(chunk, draws - first)
        places = generator.integers(images, size=(count, images)) + images * np.arange(count)[:, None]
        counts = np.bincount(places.ravel(), minlength=count * images).reshape(count, images)
        sums[first : first + count] = counts @ values
    return sums


def percentile_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The interval between the quantiles of resampled values; nan where one of them is."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
