"""What a report reads: run folders (CSV log, configuration, tables) and folders of `attnswap compare`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lightning_tasks.compare_cell import RESULT, read_metrics
from lightning_tasks.head_table import TABLE as HEADS
from lightning_tasks.head_table import read_heads
from lightning_tasks.reason import reason
from lightning_tasks.recipes import RecipeError
from lightning_tasks.report_settings import read_run_settings, same_but_for_the_run
from lightning_tasks.robustness.table import Row, read_csv

MOST_STEPS = 200  # of what was observed of heads, so that pages stay small
LOG, RESULTS, SUMMARY, ROBUSTNESS = "metrics.csv", "results.csv", "summary.csv", "robustness.csv"
Rows = list[dict[str, Any]]  # step, metric, value
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


@dataclass(frozen=True)
class Read:
    """Everything that was read: runs, rows of summaries of comparisons, and sentences about what is missing."""

    runs: list[Run]
    summary: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def configs(self) -> list[str]:
        """The configurations, in the order in which they were given."""
        return list(dict.fromkeys(run.config for run in self.runs))

    def rows(self) -> Rows:
        """The long table: config, seed, step, metric, value."""
        return [{"config": run.config, "seed": run.seed, **row} for run in self.runs for row in run.rows]


def read_all(folders: Sequence[Path]) -> Read:
    """Read run folders and folders of comparisons; runs that differ in their seed alone are one configuration.

    Raises:
        RecipeError: a folder that is neither, a file in it that cannot be read, or one folder twice; it is named.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecipeError(f"a folder is given twice: {', '.join(map(str, folders))}")
    compared = [folder for folder in folders if is_comparison(folder)]
    alone = [read_run(folder) for folder in folders if folder not in compared]
    found = [read_comparison(folder) for folder in compared]
    if len(folders) > 1:  # names of two comparisons may be the same
        found = [_prefixed(read, folder.name) for read, folder in zip(found, compared, strict=True)]
    return Read(
        [*group_runs(alone), *(run for read in found for run in read.runs)],
        [row for read in found for row in read.summary],
        [note for read in found for note in read.notes],
    )


def is_comparison(folder: Path) -> bool:
    """Whether `attnswap compare` wrote into this folder."""
    return (folder / "cells").is_dir() or (folder / RESULTS).is_file()


def read_run(folder: Path) -> Run:
    """The run in a folder; its configuration is named by the folder.

    Raises:
        RecipeError: there is no such folder, no log in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder}: no such folder; give the folder of a run, which holds {LOG}")
    if not (folder / LOG).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{LOG}"))
        hint = f"it holds the runs {', '.join(inside[:5])}" if inside else f"a run has {LOG}, a comparison {RESULTS}"
        raise RecipeError(f"{folder} is no folder of a run or comparison: {hint}")
    return Run(
        f"{folder.resolve().parent.name}/{folder.resolve().name}",
        0,
        folder,
        [*merge_epochs(_readable(folder / LOG, read_metrics)), *_read_heads(folder)],
        read_run_settings(folder),
        _read_robustness(folder),
    )


def merge_epochs(rows: Rows) -> Rows:
    """Without Lightning's epoch means of what was logged by the step too; `_step` is no part of a name then."""
    names = {row["metric"] for row in rows}
    both = {name.removesuffix("_step") for name in names if f"{name.removesuffix('_step')}_epoch" in names}
    kept = [row for row in rows if not any(row["metric"] == f"{name}_epoch" for name in both)]
    renamed = {f"{name}_step": name for name in both}
    return [{**row, "metric": renamed.get(row["metric"], row["metric"])} for row in kept]


def group_runs(runs: Sequence[Run]) -> list[Run]:
    """Runs whose settings differ in the seed and in folders alone get one name, and are numbered by place."""
    groups: list[list[Run]] = []
    for run in runs:
        key = None if run.settings is None else same_but_for_the_run(run.settings)
        for group in groups:
            if key is not None and group[0].settings is not None and same_but_for_the_run(group[0].settings) == key:
                group.append(run)
                break
        else:
            groups.append([run])
    names = [group[0].config for group in groups]
    recipes = [name.rpartition("/")[0] for name in names]
    if len(set(recipes)) == len(recipes):
        names = recipes  # the number of a version says nothing then
    elif len(set(names)) < len(names):
        names = [str(group[0].folder) for group in groups]
    return [
        replace(run, config=name, seed=number)
        for name, group in zip(names, groups, strict=True)
        for number, run in enumerate(group)
    ]


def read_comparison(folder: Path) -> Read:
    """What `attnswap compare` wrote: its table of results (else the finished cells), settings, summary.

    Raises:
        RecipeError: nothing is finished, or a file cannot be read.
    """
    cells = {
        (config, seed): (path.parent, rows)
        for path in sorted(folder.glob(f"cells/*/seed_*/{RESULT}"))
        for config, seed, rows in [_readable(path, _read_cell)]
    }
    logged = {key: rows for key, (_, rows) in cells.items()}
    if (folder / RESULTS).is_file():
        logged = _readable(folder / RESULTS, _read_results)
    if not logged:
        raise RecipeError(f"{folder}: no cell of this comparison is finished; start the same command again")
    runs = []
    for (config, seed), rows in logged.items():
        run = Run(config, seed, folder, merge_epochs(rows))
        if (config, seed) in cells:
            of_cell = sorted(log.parent for log in cells[config, seed][0].glob(f"runs/**/{LOG}"))
            for place in of_cell[-1:]:
                run = replace(
                    run,
                    rows=[*run.rows, *_read_heads(place)],
                    folder=place,
                    settings=read_run_settings(place),
                    robustness=_read_robustness(place),
                )
        runs.append(run)
    summary = folder / SUMMARY
    unfinished = sorted(
        str(path.relative_to(folder / "cells"))
        for path in folder.glob("cells/*/seed_*")
        if not (path / RESULT).is_file()
    )
    return Read(
        runs,
        _readable(summary, _read_table) if summary.is_file() else [],
        [f"{folder}: not finished: {', '.join(unfinished)}"] if unfinished else [],
    )


def _read_robustness(folder: Path) -> list[Row]:
    table = folder / ROBUSTNESS
    return _readable(table, read_csv) if table.is_file() else []


def _read_heads(folder: Path) -> Rows:
    """What was observed of each head, as if it had been logged like what is logged of layers."""
    if not (folder / HEADS).is_file():
        return []
    rows: Rows = []
    for name, (steps, layers, values) in _readable(folder / HEADS, read_heads).items():
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).round().astype(int))
        for place, (row, layer), head in product(places, enumerate(layers), range(values.shape[2])):
            if not np.isnan(value := float(values[place, row, head])):
                metric = f"{name}/layer_{layer:02d}/head_{head:02d}"
                rows.append({"step": steps[place], "metric": metric, "value": value})
    return rows


def _read_cell(path: Path) -> tuple[str, int, Rows]:
    result = json.loads(path.read_text(encoding="utf-8"))
    return str(result["config"]), int(result["seed"]), result["rows"]


def _read_results(path: Path) -> dict[tuple[str, int], Rows]:
    """The rows of each cell, in the order of the table."""
    found: dict[tuple[str, int], Rows] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {"step": int(line["step"]), "metric": line["metric"], "value": float(line["value"])}
            found.setdefault((line["config"], int(line["seed"])), []).append(row)
    return found


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"metric", "config", "mean"} <= rows[0].keys():
        raise ValueError(f"its columns are {', '.join(map(str, rows[0]))}")
    return rows


def _readable(path: Path, read: Callable[[Path], _T]) -> _T:
    """What `read` returns.

    Raises:
        RecipeError: it found another content than it reads; the file is named.
    """
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise RecipeError(f"{path} cannot be read: {reason(error)}") from error


def _prefixed(read: Read, name: str) -> Read:
    return replace(
        read,
        runs=[replace(run, config=f"{name}: {run.config}") for run in read.runs],
        summary=[
            {
                **row,
                "config": f"{name}: {row['config']}",
                **({"reference": f"{name}: {row['reference']}"} if row.get("reference") else {}),
            }
            for row in read.summary
        ],
    )
