"""What a log says of a run that diverged: a loss that is NaN or infinite, or a guard that stopped the run."""

from __future__ import annotations

import contextlib
import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tasks.runs.metric_names import MetricName

Row = dict[str, Any]
"""A logged value: config, seed, step, metric, value."""
Cell = tuple[str, int]

STOPPED = "non_finite/stopped"
"""Logged, as 1, at the step at which :class:`~lightning_tasks.callbacks.NonFiniteGuard` stopped a run."""


SKIPPED = "non_finite/skipped"
"""Logged at each step that the guard skipped: how many it skipped so far."""


def is_loss(metric: str) -> bool:
    """Whether a metric is a loss by its name: ``train/loss``, ``val/loss_epoch``, ``loss``, ``val/perplexity``.

    What Lightning adds where there are several data loaders is left out: ``val/loss/dataloader_idx_0``.
    """
    return MetricName.parse(metric).is_loss


def first_non_finite(log: Path) -> dict[str, int]:
    """The step of the first value that is not finite, of each metric in a CSV log of Lightning that has one.

    What is no number there, in a log that other code wrote into, is passed over.
    """
    first: dict[str, int] = {}
    with log.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name in (None, "step", "epoch") or not text:
                    continue
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    if not math.isfinite(float(text)):
                        first.setdefault(str(MetricName.parse(name).at("")), int(row["step"]))
    return first


def with_stops(rows: Sequence[Row]) -> list[Row]:
    """The rows, and NaN for what a run that a guard stopped would have logged from there on.

    That is where other runs logged the metrics of its configuration, and, where all its runs were stopped, those of
    ``train/``, ``val/`` and ``test/``; and at its stop, so that each of these metrics ends with NaN.
    """
    stops = {(row["config"], row["seed"]): row["step"] for row in rows if row["metric"] == STOPPED}
    if not stops:
        return list(rows)
    there = {(row["config"], row["seed"], row["metric"], row["step"]) for row in rows}
    of_config = {(row["config"], row["metric"]) for row in rows}
    whole = {row["config"] for row in rows if (row["config"], row["seed"]) not in stops}
    added = []
    for (config, seed), stop in stops.items():
        missed = {
            (row["metric"], max(row["step"], stop))
            for row in rows
            if (config, row["metric"]) in of_config or (config not in whole and MetricName.parse(row["metric"]).stage)
        }
        added += [
            {"config": config, "seed": seed, "step": step, "metric": metric, "value": math.nan}
            for metric, step in sorted(missed)
            if metric not in (STOPPED, SKIPPED) and (config, seed, metric, step) not in there
        ]
    return [*rows, *added]


def diverged_cells(rows: Sequence[Row]) -> dict[Cell, str]:
    """The runs that a guard stopped, or whose last value of a loss is not finite, and which of these it was."""
    last: dict[tuple[Cell, str], Row] = {}
    for row in rows:
        place = (row["config"], row["seed"]), row["metric"]
        if place not in last or row["step"] >= last[place]["step"]:
            last[place] = row
    losses: dict[Cell, list[str]] = {}
    for (cell, metric), row in last.items():
        if is_loss(metric) and not math.isfinite(row["value"]):
            losses.setdefault(cell, []).append(f"{metric} is {row['value']} at step {row['step']}")
    stopped = {
        cell: f"stopped at step {row['step']}: a loss or gradient was not finite"
        for (cell, metric), row in last.items()
        if metric == STOPPED
    }
    return {**{cell: ", ".join(texts) for cell, texts in losses.items()}, **stopped}


def diverged_configs(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What the legend adds to a configuration of which runs diverged: " (1 of 3 diverged)"."""
    cells = {(row["config"], row["seed"]) for row in rows}
    counts = Counter(config for config, _ in diverged_cells(rows))
    seeds = Counter(config for config, _ in cells)
    return {config: f" ({count} of {seeds[config]} diverged)" for config, count in counts.items()}
