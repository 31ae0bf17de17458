"""A module outside of its trainer's loops, in the trainer's precision."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class InPrecision(nn.Module):
    """A LightningModule as its trainer runs it, in the trainer's precision.

    Args:
        module: the LightningModule.
        trainer: its trainer.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        super().__init__()
        self.module = module
        self._plugin = trainer.precision_plugin

    def forward(self, images: Tensor) -> Tensor:
        with self._plugin.forward_context():
            return self.module(self._plugin.convert_input(images))

    def _get_name(self) -> str:
        return type(self.module).__name__

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self._plugin.forward_context():
            return self.module.predict_step(batch, batch_idx)
