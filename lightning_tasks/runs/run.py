"""What a report reads of a run: its CSV log, its configuration, its tables."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lightning_tasks.errors import UsageError, reason
from lightning_tasks.runs.heads import TABLE as HEADS, read_heads
from lightning_tasks.runs.log import COMPARISON, RESULTS, Rows, merge_epochs, read_metrics
from lightning_tasks.runs.metric_names import MetricName, head_part, layer_line
from lightning_tasks.runs.robustness import Row, read_csv
from lightning_tasks.runs.safe_files import refuse_foreign
from lightning_tasks.runs.settings import read_run_settings

MOST_STEPS = 200  # of what was observed of heads, so that pages stay small
NAMED = 3  # folders in a hint
LOG, ROBUSTNESS = "metrics.csv", "robustness.csv"  # of a run
_T = TypeVar("_T")


@dataclass(frozen=True)
class Run:
    """One run: what it logged, and how it was configured (None where its folder does not say)."""

    config: str
    seed: int
    folder: Path
    rows: Rows
    settings: dict[str, Any] | None = None
    robustness: list[Row] = field(default_factory=list)


def is_comparison(folder: Path) -> bool:
    """Whether `attnswap compare` wrote into this folder."""
    return (folder / "cells").is_dir() or any((folder / name).is_file() for name in (COMPARISON, RESULTS))


def read_run(folder: Path) -> Run:
    """The run in a folder; its configuration is named by the folder.

    Raises:
        UsageError: there is no such folder, no log in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder of a run, which holds {LOG}")
    if not (folder / LOG).is_file():
        inside = [str(place) for place in runs_below(folder, NAMED + 1)]
        others = " and others" if len(inside) > NAMED else ""
        hint = f"a run has {LOG}, a comparison {RESULTS}"
        if inside:
            hint = f"below it are {', '.join(inside[:NAMED])}{others}, which can be given"
        raise UsageError(f"{folder} is no folder of a run or comparison: {hint}")
    return Run(
        f"{folder.resolve().parent.name}/{folder.resolve().name}",
        0,
        folder,
        [*merge_epochs(readable(folder / LOG, read_metrics, folder)), *read_head_rows(folder)],
        read_run_settings(folder),
        read_robustness(folder),
    )


def runs_below(folder: Path, most: int, depth: int = 4, width: int = 1000) -> list[Path]:
    """At most `most` folders of runs and comparisons down to `depth` folders below, the nearest first.

    Of each depth `width` folders are looked into, so that a home folder or a data set takes no minutes.
    """
    found: list[Path] = []
    level = [folder]
    for _ in range(depth):
        below: list[Path] = []
        for child in islice((child for parent in level for child in _folders_in(parent)), width):
            (found if (child / LOG).is_file() or is_comparison(child) else below).append(child)
        if len(found) >= most:
            break
        level = below
    return found[:most]


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
    except OSError:  # not ours to read
        return []


def read_robustness(folder: Path) -> list[Row]:
    table = folder / ROBUSTNESS
    return readable(table, read_csv, folder) if table.is_file() else []


def read_head_rows(folder: Path) -> Rows:
    """What was observed of each head, as if it had been logged like what is logged of layers."""
    if not (folder / HEADS).is_file():
        return []
    rows: Rows = []
    for name, (steps, layers, values) in readable(folder / HEADS, read_heads, folder).items():
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).round().astype(int))
        for place, (row, layer), head in product(places, enumerate(layers), range(values.shape[2])):
            if not np.isnan(value := float(values[place, row, head])):
                metric = str(MetricName(name, layer_line(layer), head_part(head)))
                rows.append({"step": steps[place], "metric": metric, "value": value})
    return rows


def readable(path: Path, read: Callable[[Path], _T], folder: Path) -> _T:
    """What `read` returns of a file in `folder`.

    Raises:
        UsageError: it found another content than it reads, or the file is too large, or a link out of the folder; the
            file is named.
    """
    refuse_foreign(path, folder)
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from error
