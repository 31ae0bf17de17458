"""Later tests of the last checkpoints of a comparison's cells: one table for all cells, with their variant and seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from docs.pages import tables
from docs.pages.comparison import Comparison
from docs.pages.errors import PageError
from lightning_tasks.runs.divergence import Row
from lightning_tasks.runs.robustness import right_from_text

CLEAN, TOP1 = "//accuracy", "test/top1"


@dataclass(frozen=True)
class Tested:
    """A figure of a cell's test, as in `robustness.csv` of the test's folder."""

    variant: str
    seed: int
    test: str
    name: str
    setting: str
    metric: str
    value: float = math.nan
    samples: int = 0
    note: str = ""
    right: str = ""

    @property
    def label(self) -> str:
        """`fgsm/1/255/accuracy`."""
        return f"{self.name}/{self.setting}/{self.metric}"


def tested_comparison(path: Path, test: str, found: Comparison, primary: str, margin: float) -> Comparison:
    """The figures of one test as metrics, compared as the comparison of these checkpoints is.

    Raises:
        PageError: a figure was not measured, differs from its images, or is of another checkpoint.
    """
    rows = tables.records(path, Tested)
    for row in rows:
        place = f"{path}: {row.variant} seed {row.seed}, {row.test} {row.label}"
        if math.isnan(row.value):
            raise PageError(f"{place} was not measured")
        if row.right and abs(right_from_text(row.right, row.samples).mean() - row.value) * row.samples > 0.5:
            raise PageError(f"{place} is {row.value}, and its images say something else")
        if (row.test, row.label) == ("clean", CLEAN) and row.samples >= 1_000 and TOP1 in found.record.metrics:
            logged = found.by_seed(TOP1, row.variant).get(row.seed, math.nan)
            if not math.isclose(row.value, logged, rel_tol=1e-5):
                raise PageError(f"{place} is {row.value}, and {found.source} has {logged}: it is of another checkpoint")
    metrics = list(dict.fromkeys(row.label for row in rows if row.test == test))
    logged_rows: list[Row] = [
        {"config": row.variant, "seed": row.seed, "step": 0, "metric": row.label, "value": row.value}
        for row in rows
        if row.test == test
    ]
    if not metrics or (primary and primary not in metrics):
        raise PageError(f"{path} has no {primary} of the test {test!r}; it has {', '.join(metrics) or 'none'}")
    there = {row["config"] for row in logged_rows}
    record = replace(
        found.record,
        metrics=metrics,
        primary=primary,
        margins={primary: margin} if margin else {},
        references={
            name: [each for each in others if each in there] for name, others in found.record.references.items()
        },
    )
    return Comparison(record, logged_rows, [], path)
