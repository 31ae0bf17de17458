"""What penalties of attention maps share: they enter the loss through the queries or keys that they are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from attention_modules.stabilizers.attach import attach_penalty
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver, layers_with_own_logits
from lightning_tasks.training.limits import check_number


@dataclass
class _Call:
    """A forward pass through a layer; ``entered`` is the backward pass with its penalty, counted from 1; 0 is none."""

    entered: int = 0


class MapPenalty(QueryKeyObserver):
    """Adds weight · Σ over layers and calls of :meth:`_penalty` to the loss of each training batch.

    The gradient is added in the backward pass of the loss itself, at the queries and keys, so that accumulation,
    gradient scaling, clipping, DDP and activation checkpointing treat it as the loss's own. That is the first backward
    pass of Lightning's (``manual_backward`` with manual optimization) through a call: gradients that the module takes
    itself, as for a gradient penalty, are without it. The loss that is logged does not hold it.
    """

    metric: ClassVar[str]

    def __init__(self, weight: float, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__(where, layers, exclude)
        self.weight = check_number("weight", weight, minimum=0.0)
        self._share = 1.0
        self._scaler: Any = None
        self._values: list[Tensor] = []  # of the penalties that entered
        self._passed = False  # whether a backward pass of others went through
        self._backward_passes = 0  # of Lightning's
        self._with: set[int] = set()  # layers whose queries or keys have taken a gradient in this fit
        self._without: set[int] = set()  # and those that were called without, since the last backward pass

    @abstractmethod
    def _penalty(self, query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
        """Of one layer's call, a scalar, without the weight."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if own := layers_with_own_logits(self._chosen(pl_module)):
            raise ValueError(f"{type(self).__name__} is of softmax(q kᵀ), which is not the map of {own}; exclude= them")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._with.clear()
        self._without.clear()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._open()
        self._share = 1 / trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1.0
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        self._backward_passes += 1
        if idle := self._without - self._with:
            text = (
                f"{type(self).__name__}: neither queries nor keys of {self._layers[min(idle)].name!r} take a gradient, "
                "so the penalty would change nothing; train its weights, or name the layer in exclude="
            )
            if pl_module.automatic_optimization:
                raise ValueError(text)
            rank_zero_warn(text)  # another optimizer's turn may train it
        self._without.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unhook()
        values, passed = self._values, self._passed
        self._forget()
        if values:
            pl_module.log(self.metric, torch.stack(values).sum())
        elif passed and not pl_module.automatic_optimization:
            rank_zero_warn(
                f"{type(self).__name__}: the backward pass of this step was not Lightning's, and the penalty did not "
                "enter it; call self.manual_backward(loss) in place of loss.backward()"
            )

    def _see(
        self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: tuple[Any, dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # Without gradients nothing trains: an evaluation within the step, or the first pass of a reentrant checkpoint.
        if not torch.is_grad_enabled() or not len(query):
            return None
        if not (query.requires_grad or key.requires_grad):
            self._without.add(index)
            return None
        self._with.add(index)
        args, kwargs = call
        if given["attn_mask"] is not None:
            given = {**given, "attn_mask": given["attn_mask"].detach()}
        penalty = partial(self._enter, given, _Call())
        if query is key:  # without a query, or one tensor for both
            (attached,) = attach_penalty(lambda both: penalty(both, both), key)
            return tuple(attached if part is key else part for part in args), kwargs
        return (*attach_penalty(penalty, query, key), *args[2:]), kwargs

    def _enter(self, given: dict[str, Any], call: _Call, query: Tensor, key: Tensor) -> Tensor | None:
        """The penalty of a call, times what the gradient of the loss starts with; None in others' backward passes."""
        if not self._in_backward:
            self._passed = True
            return None
        if call.entered not in (0, self._backward_passes):
            return None
        penalty = self.weight * self._penalty(query, key, given)
        if not call.entered:
            self._values.append(penalty.detach())
        call.entered = self._backward_passes
        if not self.weight:
            return None
        start = torch.full_like(penalty.detach(), self._share)
        return penalty * (start if self._scaler is None else self._scaler.scale(start))

    def _forget(self) -> None:
        self._values, self._passed = [], False
