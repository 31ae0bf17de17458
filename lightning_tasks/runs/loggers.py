"""Histograms and charts of several lines, in the loggers that take them: W&B's and TensorBoard's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from attention_modules.extras import needed_for

BINS = 64
_MOST_ROWS = 10_000  # of a table behind a chart of W&B's
Curve = tuple[list[int], list[float]]


def loggers_named(trainer: Any, name: str) -> list[Any]:
    """The trainer's loggers of the class ``name`` or one derived from it, of either Lightning package."""
    return [logger for logger in trainer.loggers if name in {kind.__name__ for kind in type(logger).__mro__}]


def wandb_library() -> Any:
    """The package `wandb`.

    Raises:
        ModuleNotFoundError: without the extra ``wandb``.
    """
    with needed_for("a WandbLogger", "wandb"):
        import wandb

    return wandb


def keeps_history(trainer: Any) -> bool:
    """Whether a logger keeps what is logged again under the same name, and shows it while the run goes on."""
    return bool(loggers_named(trainer, "WandbLogger") or loggers_named(trainer, "TensorBoardLogger"))


def log_histogram(trainer: Any, name: str, values: np.ndarray, step: int) -> None:
    """Log a histogram of those ``values`` that are finite, if any, at ``step``; call it on rank zero."""
    values = values[np.isfinite(values)]
    if not len(values):
        return
    for logger in loggers_named(trainer, "WandbLogger"):
        histogram = wandb_library().Histogram
        logger.log_metrics({name: histogram(np_histogram=np.histogram(values, BINS))}, step=step)
    for logger in loggers_named(trainer, "TensorBoardLogger"):
        logger.experiment.add_histogram(name, values, step)


def log_charts(trainer: Any, owner: str, charts: Mapping[str, Mapping[str, Curve]], step: int) -> None:
    """Log charts of several lines into W&B, which replace those of the same names; call it on rank zero.

    The tables behind them are one artifact, ``run-ID-charts-OWNER``, where W&B would make one of each table. Values
    that are not finite are left out; of long curves as many points are shown as W&B takes.
    """
    for logger in loggers_named(trainer, "WandbLogger"):
        drawn = {name: chart for name, lines in charts.items() if (chart := _chart(name, lines)) is not None}
        if drawn:
            _log_tables(logger.experiment, owner, {f"{name}_table": chart.table for name, chart in drawn.items()})
            logger.log_metrics(drawn, step=step)


def _chart(name: str, lines: Mapping[str, Curve]) -> Any:
    """The chart of those lines that have a point; None where none has."""
    known = {key: _thinned(curve, _MOST_ROWS // len(lines)) for key, curve in lines.items()}
    known = {key: curve for key, curve in known.items() if curve[0]}
    if not known:
        return None
    xs, ys = zip(*known.values(), strict=True)
    return wandb_library().plot.line_series(list(xs), list(ys), keys=list(known), title=name, xname="step")


def _log_tables(run: Any, owner: str, tables: Mapping[str, Any]) -> None:
    """Log tables as one artifact, and bind them to the run, which then makes none of its own of them."""
    if run.disabled:
        return
    artifact = wandb_library().Artifact(re.sub(r"[^\w.-]", "_", f"run-{run.id}-charts-{owner}"), "charts")
    for name, table in tables.items():
        artifact.add(table, name)
    run.log_artifact(artifact)
    for name, table in tables.items():
        table.bind_to_run(run, name, run.step)


def _thinned(curve: Curve, most: int) -> Curve:
    finite = [(step, value) for step, value in zip(*curve, strict=True) if math.isfinite(value)]
    places = np.linspace(0, len(finite) - 1, min(len(finite), max(2, most))).round().astype(int)
    return [finite[place][0] for place in places], [finite[place][1] for place in places]


def current_step(trainer: Any) -> int:
    """Steps taken so far, as Lightning's own metrics count them: one per batch that stepped, for any optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped  # type: ignore[no-any-return]
