"""The CSV log of a run, read as curves, last values and rows by epoch.

The standard library reads it, and not pandas: that takes `NA`, `True` and a last line that was cut for values, averages
over NaN in silence, and takes 100 times as long for the log of a short run.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_tasks.runs.metric_names import MetricName
from lightning_tasks.runs.safe_files import as_step, whole_lines

COMPARISON, RESULTS = "comparison.json", "results.csv"  # files of a comparison
_MOST_COLUMNS = 100_000
Curve = tuple[list[int], list[float]]
Rows = list[dict[str, Any]]  # step, metric, value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows {step, metric, value} of a CSV log of Lightning; nan stays, as that of a run that diverged.

    A last line that has no end is left out: it was cut while it was written, and so may be its last number.

    Raises:
        ValueError: the run logged nothing, or the file is no log.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: the run logged no metric, so that there is nothing to compare")
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.DictReader(whole_lines(file))
        names = lines.fieldnames or ["step"]  # an empty file is a log of nothing
        if "step" not in names:
            raise ValueError(f"it has no column step, but {', '.join(names)}: no log of Lightning's CSVLogger")
        if len(names) > _MOST_COLUMNS:
            raise ValueError(f"it has {len(names):,} columns, and at most {_MOST_COLUMNS:,} are read")
        return [row for line in lines for row in _values(line, lines.line_num)]


def _values(line: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The values of a line of a log."""
    if None in line:
        raise ValueError(f"line {number} has more values than there are columns")
    values = {metric: text for metric, text in line.items() if metric not in ("step", "epoch") and text}
    if not values:
        return []
    step = as_step(line["step"], f"line {number}")
    return [{"step": step, "metric": metric, "value": float(text)} for metric, text in values.items()]


def read_curves(path: Path) -> dict[str, Curve]:
    """Steps and values of every metric in a CSV log of Lightning; epoch summaries (`_epoch`) are left out."""
    curves: dict[str, Curve] = {}
    for row in read_metrics(path) if path.is_file() else ():
        metric = MetricName.parse(row["metric"])
        if metric.interval != "epoch" and math.isfinite(row["value"]):
            steps, values = curves.setdefault(str(metric.at("")), ([], []))
            steps.append(row["step"])
            values.append(row["value"])
    return curves


def merge_epochs(rows: Rows) -> Rows:
    """Without Lightning's epoch means of what was logged by the step too; `_step` is no part of a name then."""
    names = {name: MetricName.parse(name) for name in {row["metric"] for row in rows}}
    by_step = {name for name in names.values() if name.interval != "epoch" and str(name.at("epoch")) in names}
    means = {str(name.at("epoch")) for name in by_step}
    renamed = {str(name): str(name.at("")) for name in by_step}
    kept = [row for row in rows if row["metric"] not in means]
    return [{**row, "metric": renamed.get(row["metric"], row["metric"])} for row in kept]


def by_metric(rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """The rows of each metric."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["metric"], []).append(row)
    return found
