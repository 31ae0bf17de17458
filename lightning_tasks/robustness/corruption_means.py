"""What follows from the rows of corruptions: their mean, and the errors relative to a baseline's table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from lightning_tasks.robustness.corruption_error import mean_corruption_error, relative_mean_corruption_error
from lightning_tasks.robustness.corruptions import CORRUPTIONS
from lightning_tasks.runs.robustness import TABLE, Row, corruption_errors, read_csv


def read_baseline(path: Path, corrupted: Sequence[tuple[str, int]]) -> list[Row]:
    """The rows of a baseline's table.

    Raises:
        ValueError: if there is none, it lacks a corruption or severity, or has no error at all under a corruption.
    """
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"baseline {path}: no such file; give the {TABLE} of a run, or its folder")
    rows = read_csv(file)
    mean_corruption_error(dict.fromkeys(corrupted, 0.0), corruption_errors(rows)[1])
    return rows


def with_means(rows: Sequence[Row], baseline: Sequence[Row] | None, note: str) -> list[Row]:
    """The rows, the mean over corruptions among them, and the errors relative to the baseline."""
    means = _mean_row(rows)
    if means and baseline is not None:
        clean, errors = corruption_errors(rows)
        means = _with_errors(means, errors, clean, baseline, note)
    last = max((place for place, row in enumerate(rows) if row.test == "corruption"), default=-1)
    return [*rows[: last + 1], *means, *rows[last + 1 :]]


def _with_errors(
    means: list[Row], errors: Mapping[tuple[str, int], float], clean: float, baseline: Sequence[Row], note: str
) -> list[Row]:
    """The rows, and mCE and relative mCE; their note says where the baseline has another number of images."""
    base_clean, base = corruption_errors(baseline)
    samples = means[0].samples
    others = {row.samples for row in baseline if row.test == "corruption"} - {samples}
    note += f", measured on {max(others):,} images" if others else ""
    result = list(means)
    for metric, compute in (
        ("mCE", partial(mean_corruption_error, errors, base)),
        ("relative mCE", partial(relative_mean_corruption_error, errors, clean, base, base_clean)),
    ):
        try:
            value, said = compute(), note
        except ValueError as error:  # a corruption that does the baseline no harm, at the severities measured so far
            value, said = math.nan, str(error)
        result.append(Row("mean corruption", "", "", metric, value, samples, note=said))
    return result


def _mean_row(rows: Sequence[Row]) -> list[Row]:
    """The mean over those of the fifteen corruptions, and the severities, that were measured."""
    measured = [row for row in rows if row.test == "corruption" and row.name in CORRUPTIONS]
    if not measured:
        return []
    names = {row.name for row in measured}
    note = f"{len(names)} of 15 corruptions, severities {', '.join(sorted({row.setting for row in measured}))}"
    mean = sum(row.value for row in measured) / len(measured)
    return [Row("mean corruption", "", "", measured[0].metric, mean, measured[0].samples, note=note)]
