"""What a report reads of a folder of `attnswap compare`: the finished cells, else the tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import RESULT
from lightning_tasks.compare.statistics import SummaryRow, summarise
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.divergence import with_stops
from lightning_tasks.runs.log import Rows, merge_epochs
from lightning_tasks.runs.run import LOG, RESULTS, Read, Run, read_head_rows, read_robustness, readable
from lightning_tasks.runs.safe_files import as_step, read_result, refuse_foreign
from lightning_tasks.runs.settings import read_run_settings

SUMMARY = "summary.csv"
Logged = dict[tuple[str, int], Rows]  # by configuration and seed


def read_comparison(folder: Path) -> Read:
    """What `attnswap compare` wrote: its finished cells and the summary of them; where it has no cells, its tables.

    The tables are written at the end: those of a comparison that was extended since, or begun anew, are older.

    Raises:
        UsageError: nothing is finished, or a file cannot be read.
    """
    places = _read_cells(folder)
    table = readable(folder / RESULTS, _read_results, folder) if (folder / RESULTS).is_file() else {}
    if not places and not table:
        raise UsageError(f"{folder}: no cell of this comparison is finished; start the same command again")
    written = readable(folder / SUMMARY, _read_table, folder) if (folder / SUMMARY).is_file() else []
    notes = _unfinished(folder)
    if not places:
        notes += [f"{folder}: shown is {RESULTS}, which is older than the cells: none of them is finished"] * len(notes)
        runs = [Run(config, seed, folder, merge_epochs(rows)) for (config, seed), rows in table.items()]
        return Read(runs, written, notes)
    if table and set(table) != set(places):
        notes.append(
            f"{folder}: {RESULTS} ({len(table)} cells) and {SUMMARY} are of other cells than the {len(places)} that "
            "are finished now, which are shown; the same command writes the tables anew"
        )
    logged = {key: places[key][1] for key in _in_order(places, table)}
    runs = [_run_of_cell(key, places[key][0], rows) for key, rows in logged.items()]
    return Read(runs, summary_of(logged, written), notes)


def summary_of(logged: Logged, written: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The summary of the values `logged`, with the metrics and references of a summary `written` before."""
    if not written:
        return []
    first = written[0]["config"]
    configs = dict.fromkeys([*(row["config"] for row in written), *(config for config, _ in logged)])
    references: dict[str, list[str]] = {}
    for row in written:
        references.setdefault(row["config"], []).append(row.get("reference") or first)
    named = {config: [other for other in others if other != first] for config, others in references.items()}
    rows = [{"config": config, "seed": seed, **row} for (config, seed), of_cell in logged.items() for row in of_cell]
    made = summarise(with_stops(rows), list(configs), list(dict.fromkeys(row["metric"] for row in written)), named)
    return [_as_text(row) for row in made]


def prefixed(read: Read, name: str) -> Read:
    """The same with `name` before each configuration's, as those of two comparisons may be the same."""
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


def _unfinished(folder: Path) -> list[str]:
    """A sentence on the cells that were begun and have no result, if there are any."""
    places = sorted(path for path in folder.glob("cells/*/seed_*") if not (path / RESULT).is_file())
    names = ", ".join(str(path.relative_to(folder / "cells")) for path in places)
    return [f"{folder}: not finished: {names}"] if places else []


def _in_order(places: Mapping[tuple[str, int], Any], table: Logged) -> list[tuple[str, int]]:
    """The cells by configuration as in the table, which has the order of the comparison file, and by seed."""
    known = list(dict.fromkeys(config for config, _ in table))

    def place(cell: tuple[str, int]) -> tuple[int, str, int]:
        config, seed = cell
        return known.index(config) if config in known else len(known), config, seed

    return sorted(places, key=place)


def _run_of_cell(cell: tuple[str, int], folder: Path, rows: Rows) -> Run:
    config, seed = cell
    logs = sorted(log.parent for log in folder.glob(f"runs/**/{LOG}"))
    if not logs:
        return Run(config, seed, folder, merge_epochs(rows))
    place = logs[-1]
    refuse_foreign(place / LOG, folder)
    shown = [*merge_epochs(rows), *read_head_rows(place)]
    return Run(config, seed, place, shown, read_run_settings(place), read_robustness(place))


def _as_text(row: SummaryRow) -> dict[str, str]:
    return {key: str(value) for key, value in asdict(row).items()}


def _read_cells(folder: Path) -> dict[tuple[str, int], tuple[Path, Rows]]:
    """The folder and the rows of each finished cell, by configuration and seed."""
    found: dict[tuple[str, int], tuple[Path, Rows]] = {}
    for path in sorted(folder.glob(f"cells/*/seed_*/{RESULT}")):
        refuse_foreign(path, folder)
        result = read_result(path)
        cell = result["config"], result["seed"]
        if cell in found:
            raise UsageError(f"{path} is of the configuration and seed of {found[cell][0] / RESULT}; delete one")
        found[cell] = path.parent, result["rows"]
    return found


def _read_results(path: Path) -> Logged:
    """The rows of each cell, in the order of the table."""
    found: Logged = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {"step": as_step(line["step"]), "metric": line["metric"], "value": float(line["value"])}
            found.setdefault((line["config"], int(line["seed"])), []).append(row)
    return found


def _read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"metric", "config", "mean"} <= rows[0].keys():
        raise ValueError(f"its columns are {', '.join(map(str, rows[0]))}")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has another number of values than there are columns")
        if row.get("pairs") not in (None, "", "0"):
            for key in ("difference", "low", "high", "detectable"):
                float(row[key])
    return rows
