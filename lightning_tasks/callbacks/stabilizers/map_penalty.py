"""What penalties of attention maps share: they enter the loss through the queries or keys that they are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from attention_modules.stabilizers.attach import attach_penalty
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver, layers_with_own_logits
from lightning_tasks.training.limits import check_number


class MapPenalty(QueryKeyObserver):
    """Adds weight · Σ over layers and calls of :meth:`_penalty` to the loss of each training batch.

    The gradient is added in the backward pass of the loss itself, at the queries (keys, without a query), so that
    accumulation, gradient scaling, clipping, DDP and activation checkpointing treat it as the loss's own. The loss that
    is logged does not hold it.
    """

    metric: ClassVar[str]

    def __init__(self, weight: float, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__(where, layers, exclude)
        self.weight = check_number("weight", weight, minimum=0.0)
        self._share = 1.0
        self._scaler: Any = None
        self._values: dict[int, list[Tensor]] = {}

    @abstractmethod
    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        """Of one layer's call, a scalar, without the weight."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if own := layers_with_own_logits(self._chosen(pl_module)):
            raise ValueError(f"{type(self).__name__} is of softmax(q kᵀ), which is not the map of {own}; exclude= them")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._open()
        self._share = 1 / trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1.0
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unhook()
        seen = [value for of_layer in self._values.values() for value in of_layer]
        self._forget()
        if seen:
            pl_module.log(self.metric, torch.stack(seen).sum())

    def _see(
        self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: tuple[Any, dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Without gradients nothing trains: an evaluation within the step, or the first pass of a reentrant checkpoint.
        if not torch.is_grad_enabled() or not len(query):
            return None
        if not (query.requires_grad or key.requires_grad):
            raise ValueError(
                f"{type(self).__name__}: neither queries nor keys of {self._layers[index].name!r} take a gradient, so "
                "the penalty would change nothing; train its weights, or name the layer in exclude="
            )
        penalty = self.weight * self._penalty(query, key, given)
        if not self._in_backward or index not in self._values:
            self._values.setdefault(index, []).append(penalty.detach())
        args, kwargs = call
        if not self.weight:
            return None
        place = 0 if query is args[0] else 1
        attached = attach_penalty(args[place], penalty, self._start_of_backward(penalty))
        return tuple(attached if part is args[place] else part for part in args), kwargs

    def _start_of_backward(self, penalty: Tensor) -> Tensor:
        """What the gradient of the loss starts with, as Lightning makes it."""
        factor = torch.full_like(penalty.detach(), self._share)
        return factor if self._scaler is None else self._scaler.scale(factor)

    def _forget(self) -> None:
        self._values = {}
