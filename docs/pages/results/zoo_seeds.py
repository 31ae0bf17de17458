"""All mechanisms side by side: their comparisons, of the first seeds, of the further ones of some, and of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from docs.pages.raw import RESULTS, Comparison, Raw
from lightning_tasks.compare.summary import SummaryRow, corrected_by_family

# By part: digits and scale of the score.
SCORES = {"images": ("test/top1", 1, 100.0), "text": ("test/perplexity", 2, 1.0)}
SOFTMAX, WIDER, LONGER = "softmax", ("softmax wider", "softmax widest"), ("softmax longer", "softmax longest")
LONGEST = {"images": "softmax longest", "text": "softmax longer"}  # of the controls of a part
BETTER, BETTER_SIGN = {"images": "higher", "text": "lower"}, {"images": 1, "text": -1}
TIME = "to the first"  # of a training step, to that of softmax: the benchmark's name
DECIDED = ("lower", "higher")  # the verdicts of what holds after the correction


class Seeds(NamedTuple):
    """The comparison of a part: its first seeds, the further ones of some mechanisms, and all of these."""

    first: Comparison
    further: Comparison
    both: Comparison


def read(raw: Raw, part: str, more: str = "") -> Comparison | None:
    """The comparison, or its further seeds; None before it has run."""
    folder = f"{part}{more}"
    return raw.comparison(folder, f"zoo/{part}") if (raw.folder / folder / RESULTS).is_file() else None


def seeds_of(raw: Raw, part: str) -> Seeds:
    """All seeds of a part.

    Raises:
        PageError: some have not run.
    """

    def together_with_further() -> Seeds:
        first, further = (raw.comparison(f"{part}{more}", f"zoo/{part}") for more in ("", "_more"))
        return Seeds(first, further, together(first, further))

    return raw.once(("seeds", part), together_with_further)


def together(first: Comparison, further: Comparison) -> Comparison:
    """All seeds of the configurations that have further ones."""
    rows = [row for row in first.rows if row["config"] in further.configs]
    return replace(further, rows=[*rows, *further.rows], images=())


def corrected(metric: str, first: Comparison, both: Comparison) -> list[SummaryRow]:
    """The rows of `both` of a metric: their p-values are corrected for all differences of the first seeds.

    The first seeds chose the configurations of `both` among all, so that all differences are one family.
    """
    rows = [row for row in both.summary if row.metric == metric]
    followed = {(row.config, row.reference) for row in rows}
    others = [row for row in first.summary if row.metric == metric and (row.config, row.reference) not in followed]
    return corrected_by_family([*rows, *others])[: len(rows)]


def is_mechanism(config: str) -> bool:
    """Whether a configuration is neither softmax nor a control."""
    return not config.startswith((SOFTMAX, "uniform"))


def to_softmax(rows: Iterable[SummaryRow], metric: str) -> dict[str, SummaryRow]:
    """The differences to softmax in a metric, by mechanism."""
    found = (row for row in rows if row.metric == metric and row.reference == SOFTMAX)
    return {row.config: row for row in found if is_mechanism(row.config)}


def over_eight(part: str, seeds: Seeds) -> dict[str, SummaryRow]:
    """The differences to softmax over all seeds, of the mechanisms that have further ones."""
    metric, _, _ = SCORES[part]
    return to_softmax(corrected(metric, seeds.first, seeds.both), metric)


def over_all(part: str, seeds: Seeds) -> dict[str, SummaryRow]:
    """The same of every mechanism, with all seeds that it has."""
    metric, _, _ = SCORES[part]
    return to_softmax(seeds.first.summary, metric) | over_eight(part, seeds)


def ranked(part: str, first: Comparison) -> list[str]:
    """The mechanisms by the means of their first seeds, the best one first."""
    rows = to_softmax(first.summary, SCORES[part][0])
    return sorted(rows, key=lambda config: -BETTER_SIGN[part] * rows[config].difference)


def best_and_worst(part: str, first: Comparison) -> tuple[list[str], list[str]]:
    """The five best mechanisms, and the five worst, the worst one first."""
    order = ranked(part, first)
    return order[:5], order[:-6:-1]


def control_row(part: str, seeds: Seeds) -> SummaryRow:
    """The difference to softmax of softmax that trains longest, over all seeds."""
    rows = corrected(SCORES[part][0], seeds.first, seeds.both)
    (found,) = (row for row in rows if (row.config, row.reference) == (LONGEST[part], SOFTMAX))
    return found


def step_times(raw: Raw, part: str) -> dict[str, float]:
    """The time of a training step to that of softmax, as it was measured afterwards."""
    return {row["variant"]: float(row[TIME]) for row in raw.step_costs(f"zoo/{part}")}
