"""What paired differences say of a claim."""

from __future__ import annotations

from collections.abc import Sequence

from docs.pages.errors import PageError
from lightning_tasks.compare.summary import SummaryRow

OPPOSITE = {"lower": "higher", "higher": "lower"}


def verdict(claimed: str, *rows: SummaryRow) -> str:
    """Whether a difference is as was claimed ("lower" or "higher"), by the verdicts of `rows` on it.

    It holds where all of them say so, and it does not where all say the opposite or that the two are equivalent. All
    else shows nothing, and the verdicts say why.

    Raises:
        PageError: a row has no verdict.
    """
    found = list(dict.fromkeys(row.verdict for row in rows))
    if "" in found or not found:
        raise PageError("a claim has a row without a verdict: nothing is paired")
    said = " or ".join(found)
    if all(each.split(",")[0] == claimed and "not after" not in each for each in found):
        return f"holds here ({said})"
    against = {OPPOSITE[claimed], f"{OPPOSITE[claimed]}, but budget too small", "equivalent", "equal"}
    return f"{'does not hold here' if set(found) <= against else 'not shown here'} ({said})"


def span(rows: Sequence[SummaryRow]) -> tuple[float, float]:
    """The least and the largest difference."""
    return min(row.difference for row in rows), max(row.difference for row in rows)
