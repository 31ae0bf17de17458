"""The tables and the figure of a comparison, written of the cells that are finished."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_modules.mechanism import did_you_mean
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.formats import WRITTEN, said_of, write_summary
from lightning_tasks.compare.images import ImageResults
from lightning_tasks.compare.record import environment_remarks, finished_before
from lightning_tasks.compare.summary import Endpoints, PairedCell, SummaryRow, not_logged, summarize, unpaired
from lightning_tasks.figures.curves import draw_comparison
from lightning_tasks.runs.divergence import diverged_cells, diverged_configs, with_stops
from lightning_tasks.runs.run import RESULTS
from lightning_tasks.runs.safe_files import write_rows, written_whole

CURVES = "curves.png"
RESULT_COLUMNS = ("config", "seed", "step", "metric", "value")


def collect_results(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """The rows of every finished cell: config, seed, step, metric, value."""
    return [
        {"config": cell.name, "seed": cell.seed, **row}
        for cell in cells
        if cell.is_finished()
        for row in cell.result()["rows"]
    ]


def write_results(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the long table, whole or not at all."""
    write_rows(path, RESULT_COLUMNS, rows)


def unpaired_seeds(cells: Iterable[Cell]) -> list[str]:
    """What breaks the pairing: a sentence for each cell whose weights or data differ from those of its seed's first."""
    return unpaired(
        PairedCell(
            cell.name,
            cell.seed,
            cell.result()["initial_weights"],
            cell.result()["training_data"],
            bool(cell.result().get("stopped")),
        )
        for cell in cells
        if cell.is_finished()
    )


def _other_seeds(cells: Sequence[Cell], planned: Sequence[Cell]) -> list[str]:
    """The seeds of each configuration that are finished too and not asked for: who chose them, chose the result."""
    found: dict[str, list[str]] = {}
    for cell in finished_before({cell.name: cell for cell in planned or cells}.values(), cells):
        found.setdefault(cell.name, []).append(str(cell.seed))
    return [f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" for name, seeds in found.items()]


def write_curves(rows: Sequence[dict[str, Any]], names: Sequence[str], metrics: Sequence[str], file: Path) -> None:
    """Draw the metrics over the steps into a PNG file, where any of them was logged."""
    figure = draw_comparison(rows, names, metrics, diverged_configs(rows))
    if figure is not None:
        with written_whole(file) as path:
            figure.savefig(path, dpi=110, format="png")


def write_tables(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]],
    output: Path,
    choices: Sequence[str] = (),
    endpoints: Endpoints | None = None,
    planned: Sequence[Cell] = (),
) -> list[SummaryRow] | None:
    """Write and print what the finished cells say; return the summary, None where no cell is finished.

    `choices` are sentences that `summary.md` lists, `endpoints` what was said of the metrics before, and `planned` the
    cells of all variants, where `cells` are of some.
    """
    rows, names = collect_results(cells), list(dict.fromkeys(cell.name for cell in cells))
    write_results(rows, output / RESULTS)
    if not rows:
        for name in (*WRITTEN, CURVES):  # of cells that are no longer there, or of other settings
            (output / name).unlink(missing_ok=True)
        return None
    logged = sorted({row["metric"] for row in rows})
    remarks = {
        "Changed after cells had finished": endpoints.changed if endpoints else [],
        "Chosen": choices,
        "Diverged": [f"{config} seed {seed}: {text}" for (config, seed), text in diverged_cells(rows).items()],
        "Not paired": unpaired_seeds(cells),
        "Environments": environment_remarks(cells),
        "Finished, with other seeds than these tables": _other_seeds(cells, planned),
        "Not finished": [cell.label for cell in cells if not cell.is_finished()],
    }
    rows = with_stops(rows)
    remarks["Not logged"] = not_logged(rows, metrics)
    summary = summarize(rows, names, metrics, references, endpoints)
    finished = [cell for cell in cells if cell.is_finished()]
    results = ImageResults({(cell.name, cell.seed): cell.folder for cell in finished}, output)
    intervals = results.intervals(summary)
    remarks |= {"Intervals": said_of(intervals), "Without an interval over images": [*results.notes]}
    print(write_summary(summary, remarks, output, intervals))
    if absent := [metric for metric in metrics if metric not in logged]:
        near = "".join(did_you_mean(metric, logged) for metric in absent)
        print(f"never logged: {', '.join(absent)};{near} --metrics takes {', '.join(logged)}", file=sys.stderr)
    write_curves(rows, names, metrics, output / CURVES)  # last: no error of a figure costs the tables
    return summary
