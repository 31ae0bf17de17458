"""Histograms and charts of several lines, in the loggers that take them: W&B's and TensorBoard's."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 64


def loggers_named(trainer: Any, name: str) -> list[Any]:
    """The trainer's loggers of the class ``name`` or one derived from it, of either Lightning package."""
    return [logger for logger in trainer.loggers if name in {kind.__name__ for kind in type(logger).__mro__}]


def keeps_history(trainer: Any) -> bool:
    """Whether a logger keeps what is logged again under the same name, and shows it while the run goes on."""
    return bool(loggers_named(trainer, "WandbLogger") or loggers_named(trainer, "TensorBoardLogger"))


def log_histogram(trainer: Any, name: str, values: np.ndarray, step: int) -> None:
    """Log a histogram of ``values`` at ``step``; call it on rank zero."""
    for logger in loggers_named(trainer, "WandbLogger"):
        from wandb import Histogram

        logger.log_metrics({name: Histogram(np_histogram=np.histogram(values, BINS))}, step=step)
    for logger in loggers_named(trainer, "TensorBoardLogger"):
        logger.experiment.add_histogram(name, values, step)
