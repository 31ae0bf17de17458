"""The summary of a comparison: a row for each metric, configuration and reference, with its verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from lightning_tasks.compare.statistics import (
    differ_alike,
    equivalence_p,
    holm,
    last_values,
    minimum_detectable_effect,
    paired_interval,
    paired_p,
)
from lightning_tasks.runs.divergence import diverged_cells
from lightning_tasks.runs.log import by_metric

LEVEL = 0.05
FEWEST = 4  # pairs, below which there is no verdict


@dataclass(frozen=True)
class SummaryRow:
    """One metric of one configuration over its seeds; differences are to the configuration `reference`, seed by seed.

    `detectable` is the smallest true difference that a paired t-test at level 0.05 finds with probability 0.8, given
    the spread seen here. `p` is that of the t-test, `corrected` the same after Holm's correction for the rows of its
    family: those of the primary endpoint, or all others. `within` is the p-value that the difference is within
    `margin`, which was stated before. These are nan where there is no reference or fewer than two seeds are paired,
    where a value of a pair is not finite, and the p-values where all differences are equal but for rounding.
    `diverged` counts the seeds with such a value, or whose run diverged by its losses; `reference_diverged` those of
    the reference.
    """

    metric: str
    config: str
    seeds: int
    mean: float
    std: float
    reference: str = ""
    pairs: int = 0
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    detectable: float = math.nan
    diverged: int = 0
    reference_diverged: int = 0
    p: float = math.nan
    corrected: float = math.nan
    margin: float = math.nan
    within: float = math.nan
    primary: bool = False

    @property
    def verdict(self) -> str:
        """What the paired differences say, in a few words; empty where nothing is paired and nothing diverged."""
        if self.diverged:
            return "diverged"
        if self.pairs == 0:
            return ""
        if self.reference_diverged:
            return "reference diverged"
        if self.low == self.high:
            return "equal" if self.difference == 0.0 else "no spread"
        if self.pairs < FEWEST:
            return "too few pairs"
        side = "lower" if self.difference < 0 else "higher"
        if self.corrected < LEVEL:
            return side if abs(self.difference) >= self.detectable else f"{side}, but budget too small"
        if self.within < LEVEL:
            return "equivalent"
        return f"{side}, not after correction" if self.p < LEVEL else "budget too small"


@dataclass(frozen=True)
class ImageInterval:
    """A 95% interval of the difference of a configuration to a reference over images, which are drawn anew.

    The difference is the mean over their common seeds, and the runs of these are as they are: images are drawn for all
    of them together.

    Args:
        metric, config, reference: which row of the summary it belongs to.
        images, seeds: how many.
        low, high: the interval.
    """

    metric: str
    config: str
    reference: str
    images: int
    seeds: int
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Endpoints:
    """What was said of a comparison's metrics before it ran.

    Args:
        primary: the metric that decides; "" where none was named.
        margins: by metric, the difference below which two configurations count as equivalent.
    """

    primary: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)


def summarize(
    rows: Sequence[dict[str, Any]],
    configs: Sequence[str],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]] | None = None,
    endpoints: Endpoints | None = None,
) -> list[SummaryRow]:
    """A row for each metric that was logged, each configuration that has it, and each of its references.

    Those are `configs[0]` for all but itself, and then those that `references` has for the configuration.
    """
    endpoints = endpoints or Endpoints()
    summary = []
    diverged = diverged_cells(rows)
    logged = by_metric(rows)
    for metric in metrics:
        values = last_values(logged.get(metric, []), metric)
        bad = {
            config: sum(not math.isfinite(value) or (config, seed) in diverged for seed, value in of_seeds.items())
            for config, of_seeds in values.items()
        }
        for config in configs:
            if config in values:
                first = configs[0] if config != configs[0] else ""
                named = dict.fromkeys([first, *(references or {}).get(config, ())])
                for reference in named:
                    margin = endpoints.margins.get(metric, math.nan)
                    row = _summary_row(metric, config, values, reference, margin)
                    row = replace(row, diverged=bad[config], reference_diverged=bad.get(reference, 0))
                    summary.append(replace(row, primary=metric == endpoints.primary))
    return corrected_by_family(summary)


def not_logged(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> list[str]:
    """For each metric that some runs logged and others did not, the latter: their seeds are in no mean of it."""
    logged = by_metric(rows)
    runs = dict.fromkeys((row["config"], row["seed"]) for row in rows)
    found = []
    for metric in dict.fromkeys(metrics):
        there = {(row["config"], row["seed"]) for row in logged.get(metric, ())}
        if there and (absent := [f"{config} seed {seed}" for config, seed in runs if (config, seed) not in there]):
            found.append(f"{metric}: {', '.join(absent)}")
    return found


def corrected_by_family(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows with p-values that are corrected for the number of those of the primary endpoint, or of the others."""
    corrected = [math.nan] * len(rows)
    for primary in (True, False):
        places = [place for place, row in enumerate(rows) if row.primary is primary]
        for place, p in zip(places, holm([rows[place].p for place in places]), strict=True):
            corrected[place] = p
    return [replace(row, corrected=p) for row, p in zip(rows, corrected, strict=True)]


def _summary_row(
    metric: str, config: str, values: Mapping[str, dict[int, float]], reference: str, margin: float
) -> SummaryRow:
    own, other = values[config], values.get(reference, {})
    std = _std(list(own.values()))
    row = SummaryRow(metric, config, len(own), float(np.mean(list(own.values()))), std, reference, margin=margin)
    seeds = sorted(own.keys() & other.keys())
    differences = [own[seed] - other[seed] for seed in seeds]
    if len(differences) < 2:
        return row
    if not np.isfinite(differences).all():
        return replace(row, pairs=len(differences))
    if differ_alike([own[seed] for seed in seeds], [other[seed] for seed in seeds]):
        mean = float(np.mean(differences))
        return replace(row, pairs=len(differences), difference=mean, low=mean, high=mean, detectable=0.0)
    low, high = paired_interval(differences)
    detectable = minimum_detectable_effect(float(np.std(differences, ddof=1)), len(differences))
    within = math.nan if math.isnan(margin) else equivalence_p(differences, margin)
    paired = {"pairs": len(differences), "difference": float(np.mean(differences)), "low": low, "high": high}
    tested = {"detectable": detectable, "p": paired_p(differences), "within": within}
    return SummaryRow(**{**asdict(row), **paired, **tested})


def _std(values: Sequence[float]) -> float:
    """The standard deviation over seeds; nan of one, and where one is not finite."""
    return float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else math.nan


@dataclass(frozen=True)
class PairedCell:
    """What makes a finished cell one of a pair.

    Args:
        config, seed: which cell it is.
        initial_weights, training_data: digests.
        stopped: whether a guard stopped it, so that it saw the beginning of the data only.
    """

    config: str
    seed: int
    initial_weights: str
    training_data: str
    stopped: bool


def unpaired(cells: Iterable[PairedCell]) -> list[str]:
    """What breaks the pairing: a sentence for each cell whose weights or data differ from those of its seed's first."""
    first: dict[int, PairedCell] = {}
    found = []
    for cell in cells:
        other = first.setdefault(cell.seed, cell)
        texts = []
        if cell.initial_weights != other.initial_weights:
            texts.append("initial weights")
        if cell.training_data != other.training_data and not (cell.stopped or other.stopped):
            texts.append("training data")
        found += [f"{cell.config} seed {cell.seed}: {text} differ from those of {other.config}" for text in texts]
    return found
