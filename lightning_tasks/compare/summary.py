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
    the spread seen here, without a correction. `p` is that of the t-test, `corrected` the same after Holm's correction
    for its family, of `family` comparisons: those of the primary endpoint, or of all other metrics, whether they have a
    p-value or not. `within` is the p-value that the difference is within `margin`, which was stated before, and
    `within_corrected` is corrected in the same way. These are nan where there is no reference or fewer than two seeds
    are paired, or where a value of a pair is not finite; the p-values also where all differences are equal but for
    rounding. `diverged` counts the seeds with such a value, or whose run diverged by its losses, which has no other
    value then; `reference_diverged` those of the reference.
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
    family: int = 0
    within_corrected: float = math.nan

    @property
    def verdict(self) -> str:
        """What the paired differences say, in a few words; empty where nothing is paired and nothing diverged."""
        if self.diverged:
            return "diverged"
        if self.reference_diverged:
            return "reference diverged"
        if self.pairs == 0:
            return ""
        if self.pairs < FEWEST:
            return "too few pairs"
        if self.low == self.high:
            return "equal" if self.difference == 0.0 else "no spread"
        if self.corrected < LEVEL and abs(self.difference) >= self.detectable:
            return "lower" if self.difference < 0 else "higher"
        return "equivalent" if self.within_corrected < LEVEL else "undecided"


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
        comparisons: how many differences were asked for of each metric, whether they have a result or not; 0 where
            nobody said: then those between the configurations of the summary count.
        changed: sentences on a primary endpoint or margins that were others when cells had finished already.
    """

    primary: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)
    comparisons: int = 0
    changed: Sequence[str] = ()


def references_of(config: str, configs: Sequence[str], references: Mapping[str, Sequence[str]] | None) -> list[str]:
    """What a configuration is compared with: the first one, and then those that `references` has for it."""
    first = [configs[0]] if config != configs[0] else []
    return list(dict.fromkeys([*first, *(references or {}).get(config, ())]))


def count_comparisons(configs: Sequence[str], references: Mapping[str, Sequence[str]] | None = None) -> int:
    """How many differences between configurations a metric has."""
    return sum(len(references_of(config, configs, references)) for config in configs)


def summarize(
    rows: Sequence[dict[str, Any]],
    configs: Sequence[str],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]] | None = None,
    endpoints: Endpoints | None = None,
) -> list[SummaryRow]:
    """A row for each metric that was logged, each configuration that has it, and each of its references.

    A run that diverged has NaN for each metric that other runs of its configuration logged, and where all of them
    diverged, for each that any run did.
    """
    endpoints = endpoints or Endpoints()
    summary = []
    lost, every = _seeds(diverged_cells(rows)), _seeds((row["config"], row["seed"]) for row in rows)
    logged = by_metric(rows)
    comparisons = max(endpoints.comparisons, count_comparisons(configs, references))
    others = len({*metrics} - {endpoints.primary})
    for metric in metrics:
        values = last_values(logged.get(metric, []), metric)
        for config, seeds in lost.items():  # what these logged all the same says nothing
            if config in values or (values and seeds == every[config]):
                values.setdefault(config, {}).update(dict.fromkeys(seeds, math.nan))
        bad = {
            config: sum(not math.isfinite(value) for value in of_seeds.values()) for config, of_seeds in values.items()
        }
        for config in configs:
            if config in values:
                alone = [""] if config == configs[0] else []
                for reference in [*alone, *references_of(config, configs, references)]:
                    margin = endpoints.margins.get(metric, math.nan)
                    row = _summary_row(metric, config, values, reference, margin)
                    row = replace(row, diverged=bad[config], reference_diverged=bad.get(reference, 0))
                    primary = metric == endpoints.primary
                    summary.append(replace(row, primary=primary, family=comparisons * (1 if primary else others)))
    return corrected_by_family(summary)


def _seeds(cells: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    """The seeds of each configuration."""
    found: dict[str, set[int]] = {}
    for config, seed in cells:
        found.setdefault(config, set()).add(seed)
    return found


def not_logged(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> list[str]:
    """For each metric that some runs logged and others did not, the latter: no mean of it has a value of theirs."""
    logged = by_metric(rows)
    runs = dict.fromkeys((row["config"], row["seed"]) for row in rows)
    found = []
    for metric in dict.fromkeys(metrics):
        there = {(row["config"], row["seed"]) for row in logged.get(metric, ())}
        absent = _seeds(run for run in runs if there and run not in there)
        texts = [
            f"{config} seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"
            for config, seeds in absent.items()
        ]
        found += [f"{metric}: {'; '.join(texts)}"] if texts else []
    return found


def corrected_by_family(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows with corrected p-values: the primary endpoint is one family, all other metrics are another."""
    found = list(rows)
    for primary in (True, False):
        places = [place for place, row in enumerate(rows) if row.primary is primary and row.reference]
        count = max([rows[place].family for place in places], default=0)
        corrected = [holm([getattr(rows[place], name) for place in places], count) for name in ("p", "within")]
        for place, p, within in zip(places, *corrected, strict=True):
            found[place] = replace(rows[place], corrected=p, within_corrected=within)
    return found


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
    first, second = [own[seed] for seed in seeds], [other[seed] for seed in seeds]
    if differ_alike(first, second):
        mean = 0.0 if differ_alike([*first, *second], [*second, *first]) else float(np.mean(differences))
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
    """What breaks the pairing: a sentence for each cell whose weights differ from those of its seed's first, or data.

    Data are compared with those of the first cell that saw all of them, and not where a guard stopped the run.
    """
    first: dict[int, PairedCell] = {}
    whole: dict[int, PairedCell] = {}  # the first that saw all of its data
    found = []
    for cell in cells:
        other = first.setdefault(cell.seed, cell)
        if cell.initial_weights != other.initial_weights:
            found.append(f"{cell.config} seed {cell.seed}: initial weights differ from those of {other.config}")
        other = cell if cell.stopped else whole.setdefault(cell.seed, cell)
        if cell.training_data != other.training_data:
            found.append(f"{cell.config} seed {cell.seed}: training data differ from those of {other.config}")
    return found
