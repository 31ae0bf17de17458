"""Names of layers in logs, and scalars logged at the very step at which a monitor fires."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_tasks.current_step import current_step


def layer_label(index: int) -> str:
    """Name of the n-th chosen layer in logged metrics."""
    return f"layer_{index:02d}"


def log_now(pl_module: pl.LightningModule, values: Mapping[str, Tensor]) -> dict[str, float]:
    """Log scalars at the current training step, whether or not ``log_every_n_steps`` falls on it; return them.

    ``self.log`` alone would write them with the next step that the trainer logs, under that step's number.
    """
    for name, value in values.items():
        pl_module.log(name, value, on_step=True, on_epoch=False, logger=False)
    if not values:
        return {}
    scalars = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))  # one transfer
    for logger in pl_module.trainer.loggers:
        logger.log_metrics(scalars, step=current_step(pl_module.trainer))
    return scalars
