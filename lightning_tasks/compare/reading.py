"""What a report reads of a folder of `attnswap compare`: the finished cells, else the table of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import RESULT, folder_name
from lightning_tasks.compare.record import CellRecord, Record, VariantRecord, read_record
from lightning_tasks.compare.statistics import p_of_interval
from lightning_tasks.compare.summary import SummaryRow, corrected_by_family, summarize
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import mixed_sources
from lightning_tasks.runs.divergence import with_stops
from lightning_tasks.runs.log import COMPARISON, RESULTS, Rows, merge_epochs
from lightning_tasks.runs.run import LOG, Run, read_head_rows, read_robustness, readable
from lightning_tasks.runs.safe_files import as_step, read_result, refuse_foreign
from lightning_tasks.runs.settings import read_run_settings

SUMMARY = "summary.csv"
Place = tuple[str, int]  # configuration and seed


@dataclass(frozen=True)
class Read:
    """Everything that was read: runs, summaries of comparisons, and sentences that a reader should know.

    `origins` are facts on comparisons: their folder, what they start from, and the code that ran them.
    """

    runs: list[Run]
    summary: list[SummaryRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    @property
    def configs(self) -> list[str]:
        """The configurations, in the order in which they were given."""
        return list(dict.fromkeys(run.config for run in self.runs))

    def rows(self) -> Rows:
        """The long table: config, seed, step, metric, value."""
        return [{"config": run.config, "seed": run.seed, **row} for run in self.runs for row in run.rows]


def read_comparison(folder: Path) -> Read:
    """The finished cells that `comparison.json` lists, with their summary; where there are none, those of the table.

    Raises:
        UsageError: nothing is finished, or a file cannot be read.
    """
    found, declared = _read_results(folder), read_record(folder)
    table = _read_table(folder) if declared is None or not found else {}
    record = declared or guessed_record(folder, table, found)
    results = {}
    for cell in _in_order(record):
        key = cell.variant, cell.seed
        if key in found and _is_of(cell, record, found[key][1]):
            results[key] = found[key]
    table = table or ({} if results else _read_table(folder))
    if not results and not table:
        raise UsageError(f"{folder}: no cell of this comparison is finished; start the same command again")
    notes = _notes(folder, record, found, results, table)
    if not results:
        runs = [Run(config, seed, folder, merge_epochs(rows)) for (config, seed), rows in table.items()]
        return Read(runs, _read_summary(folder) or _summary(table, record), notes, [_origin(folder, record)])
    runs = [_run_of_cell(key, *found) for key, found in results.items()]
    summary = _summary({key: result["rows"] for key, (_, result) in results.items()}, record)
    return Read(runs, summary, notes, [_origin(folder, record)])


def guessed_record(folder: Path, table: dict[Place, Rows], found: Iterable[Place]) -> Record:
    """The record of a folder of an earlier version, which has none: order, references and metrics of its tables.

    The order of the table is that of the comparison file. Its references and metrics are those of the summary.
    """
    written = _read_summary(folder)
    names = [*(config for config, _ in table), *(row.config for row in written)]
    configs = list(dict.fromkeys([*names, *sorted(config for config, _ in found)]))
    references: dict[str, list[str]] = {}
    for row in written:
        if row.reference in configs[1:]:
            references.setdefault(row.config, []).append(row.reference)
    return Record(
        [VariantRecord(config) for config in configs],
        references,
        list(dict.fromkeys(row.metric for row in written)),
        cells=[CellRecord(config, seed) for config, seed in found],
    )


def prefixed(read: Read, name: str) -> Read:
    """The same with `name` before each configuration's, as those of two comparisons may be the same."""
    return replace(
        read,
        runs=[replace(run, config=f"{name}: {run.config}") for run in read.runs],
        summary=[
            replace(row, config=f"{name}: {row.config}", reference=row.reference and f"{name}: {row.reference}")
            for row in read.summary
        ],
    )


def _origin(folder: Path, record: Record) -> str:
    bases = list(dict.fromkeys(variant.base for variant in record.variants if variant.base))
    codes = list(dict.fromkeys(each.code for each in record.environments))
    parts = [f"comparison {folder.resolve().name}", *(f"of {base}" for base in bases[:1])]
    return ", ".join([*parts, *([f"code {' and '.join(codes)}"] if codes else [])])


def _in_order(record: Record) -> list[CellRecord]:
    """The cells by variant, as the comparison file has them, and by seed."""
    places = {name: place for place, name in enumerate(record.configs)}
    return sorted(record.cells, key=lambda cell: (places[cell.variant], cell.seed))


def _is_of(cell: CellRecord, record: Record, result: dict[str, Any]) -> bool:
    """Whether a result is of the settings, code and files of a recorded cell, as far as both say them."""
    made_with, code = result.get("sources"), record.code[cell.code] if cell.code >= 0 else None
    return not cell.fingerprint or (cell.fingerprint == result.get("fingerprint") and made_with in (None, code))


def _notes(
    folder: Path, record: Record, found: dict[Place, Any], shown: dict[Place, Any], table: dict[Place, Rows]
) -> list[str]:
    """Sentences on cells that have no result, on those that are not shown, and on tables that are older."""
    notes, cells = [f"{folder}: chosen: {choice}" for choice in record.choices], folder / "cells"
    notes += [f"{folder}: changed after cells had finished: {text}" for text in record.changed]
    begun = {*cells.glob("*/seed_*")}
    if cells.is_dir():
        begun |= {cells / folder_name(cell.variant) / f"seed_{cell.seed}" for cell in record.cells}
    places = sorted(place for place in begun if not (place / RESULT).is_file())
    if places:
        names = ", ".join(str(place.relative_to(cells)) for place in places)
        notes.append(f"{folder}: not finished: {names}")
    if others := [f"{config} seed {seed}" for config, seed in found.keys() - shown.keys()]:
        names = ", ".join(sorted(others))
        notes.append(
            f"{folder}: not shown, as {COMPARISON} has no cells of these settings, code and files (others, or variants "
            f"that the last command left out): {names}"
        )
    states = [(of[0], result["sources"]) for of, (_, result) in shown.items() if result.get("sources") is not None]
    notes += [f"{folder}: {text}" for text in mixed_sources(states)]
    if not shown and (places or others):
        notes.append(f"{folder}: shown is {RESULTS}, which is older than the cells: none of them is finished")
    if shown and table and set(table) != set(shown):
        notes.append(
            f"{folder}: {RESULTS} ({len(table)} cells) and {SUMMARY} are of other cells than the {len(shown)} that "
            "are finished now, which are shown; the same command writes the tables anew"
        )
    return notes


def _summary(logged: dict[Place, Rows], record: Record) -> list[SummaryRow]:
    rows = [{"config": config, "seed": seed, **row} for (config, seed), of_cell in logged.items() for row in of_cell]
    configs = list(dict.fromkeys([*record.configs, *(config for config, _ in logged)]))
    return summarize(with_stops(rows), configs, record.metrics, record.references, record.endpoints)


def _run_of_cell(cell: Place, folder: Path, result: Mapping[str, Any]) -> Run:
    config, seed = cell
    rows = merge_epochs(result["rows"])
    logs = sorted((log.parent for log in folder.glob(f"runs/**/{LOG}")), key=lambda log: (len(log.name), log))
    if not logs:
        return Run(config, seed, folder, rows)
    # The fit ended in this one; before it are those that a kill ended, and behind it tests of the kept checkpoint.
    last = next((at for at, log in enumerate(logs) if log == folder / str(result.get("log"))), 0)
    heads = {}
    for log in logs[: last + 1]:
        refuse_foreign(log / LOG, folder)
        heads.update({(row["step"], row["metric"]): row for row in read_head_rows(log)})
    place = logs[last]
    return Run(config, seed, place, [*rows, *heads.values()], read_run_settings(place), read_robustness(place))


def _read_results(folder: Path) -> dict[Place, tuple[Path, dict[str, Any]]]:
    """The folder and the result of each finished cell, by configuration and seed."""
    found: dict[Place, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(folder.glob(f"cells/*/seed_*/{RESULT}")):
        refuse_foreign(path, folder)
        result = read_result(path)
        cell = result["config"], result["seed"]
        if cell in found:
            raise UsageError(f"{path} is of the configuration and seed of {found[cell][0] / RESULT}; delete one")
        found[cell] = path.parent, result
    return found


def _read_table(folder: Path) -> dict[Place, Rows]:
    """The rows of each cell in `results.csv`, in its order; none where there is no such file."""
    path = folder / RESULTS
    return readable(path, _table_rows, folder) if path.is_file() else {}


def _table_rows(path: Path) -> dict[Place, Rows]:
    found: dict[Place, Rows] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {"step": as_step(line["step"]), "metric": line["metric"], "value": float(line["value"])}
            found.setdefault((line["config"], int(line["seed"])), []).append(row)
    return found


def _read_summary(folder: Path) -> list[SummaryRow]:
    """The rows of `summary.csv`; none where there is no such file."""
    path = folder / SUMMARY
    return readable(path, _summary_rows, folder) if path.is_file() else []


def _summary_rows(path: Path) -> list[SummaryRow]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"metric", "config", "mean"} <= rows[0].keys():
        raise ValueError(f"its columns are {', '.join(map(str, rows[0]))}")
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has another number of values than there are columns")
    return corrected_by_family([_summary_row(row) for row in rows])


def _summary_row(row: dict[str, str]) -> SummaryRow:
    """A row of a summary, of which earlier versions wrote fewer columns."""
    pairs = int(row.get("pairs") or 0)
    paired: Any = {key: float(row[key]) for key in ("difference", "low", "high", "detectable")} if pairs else {}
    reference = row.get("reference", "the first" if pairs else "")
    if pairs:
        tested = {key: float(row.get(key) or "nan") for key in ("p", "margin", "within")}
        if "p" not in row:
            tested["p"] = p_of_interval(paired["difference"], paired["low"], paired["high"], pairs)
        paired |= tested
    paired["primary"] = row.get("primary") == "True"
    paired |= {key: int(row.get(key) or 0) for key in ("diverged", "reference_diverged", "family")}
    mean, std = float(row["mean"]), float(row.get("std") or "nan")
    return SummaryRow(row["metric"], row["config"], int(row.get("seeds") or 0), mean, std, reference, pairs, **paired)
