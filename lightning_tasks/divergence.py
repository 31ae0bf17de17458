"""What a log says of a run that diverged: a loss that is NaN or infinite, or a guard that stopped the run."""

from __future__ import annotations

import csv
import math
from pathlib import Path

STOPPED = "non_finite/stopped"
"""Logged, as 1, at the step at which :class:`~lightning_tasks.callbacks.NonFiniteGuard` stopped a run."""


SKIPPED = "non_finite/skipped"
"""Logged at each step that the guard skipped: how many it skipped so far."""


def is_loss(metric: str) -> bool:
    """Whether a metric is a loss by its name: ``train/loss``, ``val/loss_epoch``, ``loss``, ``val/perplexity``."""
    name = metric.rpartition("/")[2].removesuffix("_step").removesuffix("_epoch")
    return name in ("loss", "perplexity") or name.endswith("_loss")


def first_non_finite(log: Path) -> dict[str, int]:
    """The step of the first value that is not finite, of each metric in a CSV log of Lightning that has one."""
    first: dict[str, int] = {}
    with log.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if name not in ("step", "epoch") and text and not math.isfinite(float(text)):
                    first.setdefault(name.removesuffix("_step").removesuffix("_epoch"), int(row["step"]))
    return first
