"""What penalties of what layers compute share: they enter the loss's backward pass at tensors on the way to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from attention_modules.mechanisms.shared.options import check_number
from attention_modules.stabilizers.attach import attach_penalty
from lightning_tasks.callbacks.base import Where, held_parameters, refuse_line_search, unfreezes_later
from lightning_tasks.callbacks.monitoring.names import listed
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver


@dataclass
class _Call:
    """A forward pass through a layer, by its number.

    ``entered`` is the backward pass with its penalty, counted from 1; 0 is none.
    """

    index: int
    entered: int = 0


class LossPenalty(QueryKeyObserver, shared=True):
    """Adds weight · Σ over layers and calls of a penalty to the loss of each training batch: see :meth:`_attach`.

    A layer that is called several times in a step has several: of two views of a batch, or a depth that it is shared
    over, but also of micro-batches (a warning says so once).

    The gradient is added in the backward pass of the loss itself, so that accumulation, gradient scaling, clipping,
    DDP and activation checkpointing treat it as the loss's own. That is the first backward pass of Lightning's
    (``manual_backward`` with manual optimization) through a call: gradients that the module takes itself, as for a
    gradient penalty, are without it. The loss that is logged does not hold it.

    With manual optimization nobody says how many batches a step has, nor which backward pass trains the layer: each
    call's penalty enters whole, in the first ``manual_backward`` through it. Else it enters in each, as the loss does.
    """

    metric: ClassVar[str]
    of: ClassVar[str]
    """Subject of the error that says that they take no gradient: "no gates", of a layer, "take a gradient"."""

    def __init__(self, weight: float, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__(where, layers, exclude)
        self.weight = check_number("weight", weight, 0.0)
        self._share = 1.0
        self._once = False  # whether a call's penalty enters in one backward pass alone
        self._scaler: Any = None
        self._values: list[tuple[tuple[int, int], Tensor]] = []  # that entered, by layer and backward pass
        self._told_of_calls = False
        self._passed = False  # whether a backward pass of others went through
        self._backward_passes = 0  # of Lightning's
        self._with: set[int] = set()  # layers in which something has taken a gradient in this fit
        self._without: set[int] = set()  # and those that were called without, since the last backward pass

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.weight:
            refuse_line_search(trainer, type(self).__name__)
        self._with.clear()
        self._without.clear()
        held = held_parameters(trainer.optimizers)
        if idle := {
            layer.name: "" for layer in self._layers if not any(id(each) in held for each in layer.module.parameters())
        }:
            rank_zero_warn(
                f"{type(self).__name__}: no optimizer holds a weight of {listed(idle)}, so the penalty can change only "
                "what comes before; train these layers, or name them in exclude="
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._open()
        self._once = not pl_module.automatic_optimization
        self._share = 1.0 if self._once else 1 / trainer.accumulate_grad_batches
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        self._backward_passes += 1
        if idle := self._without - self._with:
            text = (
                f"{type(self).__name__}: {self.of} of {self._layers[min(idle)].name!r} take a gradient, "
                "so the penalty would change nothing; train its weights, or name the layer in exclude="
            )
            if pl_module.automatic_optimization and not unfreezes_later(trainer):
                raise ValueError(text)
            rank_zero_warn(text)  # another optimizer's turn, or a later epoch, may train it
        self._without.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unhook()
        values, passed = self._values, self._passed
        self._forget()
        if values:
            pl_module.log(self.metric, torch.stack([value for _, value in values]).sum())
            self._warn_of_calls(Counter(key for key, _ in values))
        elif passed and not pl_module.automatic_optimization:
            rank_zero_warn(
                f"{type(self).__name__}: the backward pass of this step was not Lightning's, and the penalty did not "
                "enter it; call self.manual_backward(loss) in place of loss.backward()"
            )

    def _warn_of_calls(self, calls: Counter[tuple[int, int]]) -> None:
        ((index, _), times), *_ = calls.most_common(1)
        if times > 1 and self.weight and not self._told_of_calls:
            self._told_of_calls = True
            rank_zero_warn(
                f"{type(self).__name__}: {self._layers[index].name!r} was called {times} times in a step, and each "
                f"call has its penalty: where these are parts of one batch (micro-batches, GradCache), it counts "
                f"{times} times, so divide weight by {times}; said once"
            )

    def _attach(self, index: int, penalty: Callable[..., Tensor], *parts: Tensor) -> tuple[Tensor, ...] | None:
        """These tensors of a call of a layer, whose gradients will hold the penalty's; None where they would not.

        Args:
            index: of the layer.
            penalty: of the tensors; gives a scalar, without the weight.
            parts: what the loss depends on.
        """
        # Without gradients nothing trains: an evaluation within the step, or the first pass of a reentrant checkpoint.
        if not torch.is_grad_enabled():
            return None
        if not any(part.requires_grad for part in parts):
            self._without.add(index)
            return None
        self._with.add(index)
        return attach_penalty(partial(self._enter, penalty, _Call(index)), *parts)

    def _enter(self, compute: Callable[..., Tensor], call: _Call, *parts: Tensor) -> Tensor | None:
        """The penalty of a call, times what the gradient of the loss starts with; None in others' backward passes."""
        if not self._in_backward:
            self._passed = True
            return None
        if self._once and call.entered not in (0, self._backward_passes):
            return None
        penalty = self.weight * compute(*parts)
        if not call.entered:
            self._values.append(((call.index, self._backward_passes), penalty.detach()))
        call.entered = self._backward_passes
        if not self.weight:
            return None
        start = torch.full_like(penalty.detach(), self._share)
        return penalty * (start if self._scaler is None else self._scaler.scale(start))

    def _forget(self) -> None:
        self._values, self._passed = [], False
