"""The verdict of a comparison as a W&B run of its own, in the group of its cells."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.figures.forest import draw_forest
from lightning_tasks.runs.loggers import wandb_library
from lightning_tasks.runs.wandb_runs import RunLabels, go_offline_without_key, one_run, wandb_arguments


def log_verdict(cells: Sequence[Cell], summary: Sequence[SummaryRow], output: Path) -> None:
    """Log the table of differences, a picture of those that have an interval, and what decides as the run's summary.

    Nothing where the first configuration has no W&B logger. The same comparison goes on with the same run, whichever
    machine writes it.
    """
    arguments = _logger_of(cells[0])
    if arguments is None:
        return
    from lightning.pytorch.loggers import WandbLogger

    RunLabels(cells[0].comparison, "verdict", ("comparison",)).fill(arguments)
    name = f"{cells[0].comparison} {output.resolve()}".encode(errors="surrogateescape")
    own = {"id": f"verdict-{hashlib.sha256(name).hexdigest()[:12]}", "resume": "allow", "job_type": "comparison"}
    given = {**arguments, **own, "log_model": False}
    if given.get("save_dir") in (None, "."):
        given["save_dir"] = str(output)
    go_offline_without_key()
    with one_run():
        run = WandbLogger(**given).experiment
        columns = [field.name for field in fields(SummaryRow)]
        rows = [{**asdict(row), "verdict": row.verdict} for row in summary]
        run.log(_shown([*columns, "verdict"], rows, summary))
        for row in summary:
            if row.reference and (row.primary or not any(each.primary for each in summary)):
                said = {"difference": row.difference, "low": row.low, "high": row.high, "verdict": row.verdict}
                for key, value in said.items():
                    run.summary[f"verdict/{row.metric}/{row.config} - {row.reference}/{key}"] = value


def _shown(columns: Sequence[str], rows: Sequence[dict[str, Any]], summary: Sequence[SummaryRow]) -> dict[str, Any]:
    from matplotlib.figure import Figure

    wandb = wandb_library()
    shown: dict[str, Any] = {
        "differences": wandb.Table(columns=[*columns], data=[[row[name] for name in columns] for row in rows])
    }
    for metric in dict.fromkeys(row.metric for row in summary):
        drawn = [row for row in summary if row.metric == metric and math.isfinite(row.low + row.high)]
        if drawn:
            figure = Figure(figsize=(7, 1 + 0.32 * len(drawn)), layout="constrained")
            draw_forest(figure.subplots(), drawn)
            shown[f"forest/{metric}"] = wandb.Image(figure)
    return shown


def _logger_of(cell: Cell) -> dict[str, Any] | None:
    """The arguments of its first W&B logger."""
    from lightning_tasks.cli.fit import check_arguments

    texts = [Path(cell.config).read_text(encoding="utf-8"), *cell.overrides]
    if not any("WandbLogger" in text for text in texts):
        return None
    found = wandb_arguments(check_arguments(cell.arguments).logger)
    return dict(found[0].items()) if found else None
