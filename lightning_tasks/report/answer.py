"""What a report opens with: what the comparison found, in a sentence for each difference that decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_tasks.compare.summary import FEWEST, SummaryRow

MOST = 3  # sentences


def answers(summary: Sequence[SummaryRow]) -> list[str]:
    """A sentence for each difference of the primary endpoint, or where none was named of the first metric."""
    paired = [row for row in summary if row.reference]
    decisive = [row for row in paired if row.primary] or [row for row in paired if row.metric == paired[0].metric]
    left = len(decisive) - MOST
    more = [f"{left} further difference{'s stand' if left > 1 else ' stands'} below."] if left > 0 else []
    return [*map(_sentence, decisive[:MOST]), *more]


def _sentence(row: SummaryRow) -> str:
    one, other, verdict = row.config, row.reference, row.verdict
    numbers = f"{row.difference:+.3g} [{row.low:.3g}, {row.high:.3g}]" if math.isfinite(row.low + row.high) else ""
    seeds = f"{row.pairs} seed{'' if row.pairs == 1 else 's'}"
    tail = f"difference in {row.metric} {numbers}, {seeds}" if numbers else f"{row.metric}, {seeds}"
    where = f"between {one} and {other}"
    match verdict:
        case "lower" | "higher":
            return f"{one} is {verdict} than {other}: {tail}."
        case "equivalent":
            return f"{one} and {other} are equivalent within {row.margin:.4g}: {tail}."
        case "equal":
            return f"{one} and {other} are equal: {tail}."
        case "diverged" | "reference diverged":
            lost = max(row.diverged, row.reference_diverged)
            return f"No verdict {where}: {one if row.diverged else other} diverged with {lost} of its seeds."
        case "too few pairs" | "":
            return f"No difference shown {where}: {tail}, and {FEWEST} are needed."
        case "undecided":
            small = f"so few seeds find differences from {row.detectable:.3g} on reliably"
            return f"Undecided {where}: {tail}, p {row.corrected:.2g} after Holm's correction; {small}."
        case "no spread":
            return f"No verdict {where}: all differences are alike, {tail}."
    raise ValueError(f"unknown verdict {verdict!r}")
