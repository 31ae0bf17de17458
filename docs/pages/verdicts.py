"""What paired differences say of a claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from docs.pages.errors import PageError
from lightning_tasks.compare.summary import SummaryRow

OPPOSITE = {"lower": "higher", "higher": "lower"}


def verdict(claimed: str, *rows: SummaryRow) -> str:
    """Whether a difference is as was claimed ("lower" or "higher"), by the verdicts of `rows` on it.

    It holds where all of them say just that, and it does not where all say the opposite, or that the two are
    equivalent. All else shows nothing, and the verdicts say why, with the count of each where they differ.

    Raises:
        PageError: a row has no verdict.
    """
    found = Counter(row.verdict for row in rows)
    if "" in found or not found:
        raise PageError("a claim has a row without a verdict: nothing is paired")
    if found.keys() == {claimed}:
        worth = "holds here"
    elif found.keys() <= {OPPOSITE[claimed], "equivalent"}:
        worth = "does not hold here"
    else:
        worth = "not shown here"
    counted = (f"{each}: {count} of {len(rows)}" for each, count in found.items())
    return f"{worth} ({'; '.join(counted) if len(found) > 1 else next(iter(found))})"


def by_count(those: int, of: int, what: str) -> str:
    """The same where no seeds are compared, by how many of some things are as was claimed.

    Raises:
        PageError: there are none.
    """
    if of < 1:
        raise PageError(f"a claim counts {what}, and there are none")
    worth = "holds here" if those == of else "does not hold here" if those == 0 else "not shown here"
    return f"{worth} ({what}: {those} of {of})"


def counted(rows: Sequence[SummaryRow]) -> str:
    """How many intervals exclude 0, and how many differences are lower or higher after the correction."""
    out = sum(row.excludes_zero for row in rows)
    kept = sum(row.verdict in ("lower", "higher") for row in rows)
    return f"{out} of {len(rows)} intervals exclude 0, {kept} after the correction"


def span(rows: Sequence[SummaryRow]) -> tuple[float, float]:
    """The least and the largest difference."""
    return min(row.difference for row in rows), max(row.difference for row in rows)
