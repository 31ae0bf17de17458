"""What penalties of attention maps share: they enter the loss through the queries or keys that they are made of."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_tasks.callbacks.stabilizers.loss_penalty import LossPenalty
from lightning_tasks.callbacks.stabilizers.observer import layers_with_own_logits


class MapPenalty(LossPenalty, shared=True):
    """Adds weight · Σ over layers and calls of :meth:`_penalty` to the loss of each training batch."""

    of = "neither queries nor keys"

    @abstractmethod
    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        """Of one layer's call, a scalar, without the weight."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if own := layers_with_own_logits(self._chosen(pl_module)):
            raise ValueError(f"{type(self).__name__} is of softmax(q kᵀ), which is not the map of {own}; exclude= them")

    def _see(
        self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: tuple[Any, dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not query.numel():
            return None
        args, kwargs = call
        if given["attn_mask"] is not None:
            given = {**given, "attn_mask": given["attn_mask"].detach()}
        if query is key:  # without a query, or one tensor for both
            attached = self._attach(index, lambda both: self._penalty(both, both, given), key)
            return None if attached is None else (tuple(attached[0] if part is key else part for part in args), kwargs)
        attached = self._attach(index, lambda query, key: self._penalty(query, key, given), query, key)
        return None if attached is None else ((*attached, *args[2:]), kwargs)
