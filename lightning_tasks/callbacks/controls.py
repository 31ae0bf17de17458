"""Controls for claims about the QK weights: decayed alone, or frozen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.mechanisms.shared.options import check_integer, check_number
from lightning_tasks.callbacks.base import (
    Callback,
    StepArguments,
    Where,
    behind_closure,
    calls_step_hooks,
    check_step_hooks,
    held_parameters,
    kinds_of,
    listed_before,
    refuse_flat_shards,
)
from lightning_tasks.callbacks.locater import LocAteR
from lightning_tasks.callbacks.stabilizers.qk_clip import QKClip
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.training.limits import check_layer_choice


def qk_entries(layers: Sequence[AttentionLayer]) -> list[tuple[nn.Parameter, Tensor]]:
    """Each Parameter that W_q or W_k is read from, with a boolean mask of its entries that belong to them.

    In a fused projection these are the query and key rows. Biases are not part of W_q and W_k.

    Raises:
        ValueError: if W_q and W_k are not entries of one Parameter each (LoRA, SigmaReparam), or take no gradient.
    """
    found: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for layer in layers:
        parameters = layer.qk_parameters()
        whole = all(parameter.requires_grad and parameter.ndim > 1 for parameter in parameters)
        if len(parameters) > 2 or not whole:
            raise ValueError(
                f"W_q and W_k of {layer.name!r} are computed of several (adapters, SigmaReparam), or do not require "
                "gradients; merge adapters (merge_and_unload()), unfreeze the weights, or name the layer in exclude="
            )
        with torch.enable_grad():
            read = torch.stack([weight.sum() for weight in layer.qk_weights()]).sum()
        for parameter, touched in zip(parameters, torch.autograd.grad(read, parameters), strict=True):
            _, mask = found.get(id(parameter), (parameter, torch.zeros_like(touched, dtype=torch.bool)))
            found[id(parameter)] = (parameter, mask | (touched != 0))
    return list(found.values())


class _QKControl(Callback):
    """What both controls share: the choice of layers, read anew when a fit starts."""

    def __init__(self, where: Where = None, layers: list[int] | None = None, exclude: Sequence[str] = ()) -> None:
        super().__init__()
        self.where, self.layers, self.exclude = check_layer_choice(where, layers, exclude)
        self._entries: list[tuple[nn.Parameter, Tensor]] = []
        self._hooks = ExitStack()  # of optimizers, during a batch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_flat_shards(trainer, f"{type(self).__name__} cannot hold or change weights")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._entries = qk_entries(attention_layers(pl_module, self.where, self.layers, self.exclude))

    def _forget(self) -> None:
        self._hooks.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._forget()


class QKWeightDecay(_QKControl):
    """Decoupled weight decay on W_q and W_k alone, beside the optimizer's own: W ← W (1 - lr · weight_decay).

    It comes before the optimizer's update, as in AdamW (Loshchilov and Hutter, 2019), with the learning rate of the
    weight's own group. The control of an objective that shrinks W_qᵀ W_k. What is frozen at a step, or has no gradient,
    stays as it is, as in a stage of :class:`Heal` that does not train it, or a step that a ``NonFiniteGuard`` skips
    which is listed before. A step that a gradient scaler leaves out decays nothing, and one that asks for several
    gradients (LBFGS, SAM) decays once.

    Args:
        weight_decay: at least 0.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.
        fade_steps: number of its optimizer's steps over which it falls to 0, by as much in each; it stays where None.

    Raises:
        ValueError: if ``weight_decay`` is no finite number, or negative, or ``fade_steps`` is below 1; when a fit
            starts, if the strategy is FSDP1 or DeepSpeed, no layer matches or its weights cannot be decayed alone, see
            :func:`qk_entries`, or an optimizer calls no hooks of steps.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import QKWeightDecay
        >>> trainer = Trainer(callbacks=[QKWeightDecay(0.1)], logger=False)
    """

    def __init__(
        self,
        weight_decay: float,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
        fade_steps: int | None = None,
    ) -> None:
        super().__init__(where, layers, exclude)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)
        self.fade_steps = None if fade_steps is None else check_integer("fade_steps", fade_steps, 1)
        self._done: set[int] = set()  # optimizers that have decayed in this step
        self._taken: dict[int, int] = {}  # steps by the place of their optimizer

    @property
    def state_key(self) -> str:
        """Which layers it acts on, so that several in one trainer can be resumed."""
        return self._generate_state_key(where=self.where, layers=self.layers, exclude=self.exclude)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, of each optimizer, where they count."""
        return {} if self.fade_steps is None else {"taken": dict(self._taken)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._taken = {int(place): int(count) for place, count in state_dict.get("taken", {}).items()}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._taken = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        decayed = {id(parameter) for parameter, _ in self._entries}
        holding = (each for each in trainer.optimizers if decayed & held_parameters([each]).keys())
        check_step_hooks("QKWeightDecay", holding)
        self._taken = dict.fromkeys(range(len(trainer.optimizers)), current_step(trainer)) | self._taken

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._forget()
        for optimizer in filter(calls_step_hooks, trainer.optimizers):
            # Hooks of the optimizer: a step that a gradient scaler leaves out is none, and one that looks at several
            # gradients (LBFGS) is one.
            self._hooks.callback(optimizer.register_step_pre_hook(partial(self._begin, trainer)).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._end).remove)

    def _begin(self, trainer: pl.Trainer, optimizer: Optimizer, args: Any, kwargs: Any) -> StepArguments:
        return behind_closure(args, kwargs, partial(self._decay_once, trainer, optimizer))

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._done.discard(id(optimizer))

    def _decay_once(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._done:
            self._done.add(id(optimizer))
            self._decay(trainer, optimizer)

    def _forget(self) -> None:
        super()._forget()
        self._done = set()

    @torch.no_grad()
    def _decay(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        left: float | Tensor = 1.0
        if self.fade_steps is not None:
            place = next(place for place, each in enumerate(trainer.optimizers) if each is optimizer)
            left = max(0.0, 1 - self._taken[place] / self.fade_steps)
            self._taken[place] += 1
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer leaves out steps of a scaler by itself
        if overflow is not None:
            left = left * (overflow == 0)
        rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, mask in self._entries:
            if id(parameter) in rates and parameter.requires_grad and parameter.grad is not None:
                share = left.to(parameter.device) if isinstance(left, Tensor) else left
                parameter.mul_(1 - rates[id(parameter)] * self.weight_decay * share * mask)


class FreezeQK(_QKControl):
    """Keeps W_q and W_k as they are when the fit starts (or resumes); everything else trains on.

    Their gradients are set to zero before each step (and so take no part in Lightning's clipping), and their values are
    put back after it, whatever the optimizer's weight decay made of them. Biases are not held.

    Args:
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: when a fit starts, if the strategy is FSDP1 or DeepSpeed, :class:`LocAteR`, :class:`QKClip` or
            :class:`QKWeightDecay` acts on one of the same layers, a weight average is listed before, no layer matches,
            or its weights cannot be told apart, see :func:`qk_entries`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import FreezeQK
        >>> trainer = Trainer(callbacks=[FreezeQK(layers=[0])], logger=False)
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        frozen = {layer.name for layer in attention_layers(pl_module, self.where, self.layers, self.exclude)}
        for other in listed_before(trainer, self):
            if "WeightAveraging" in kinds_of(other):
                name = type(other).__name__
                raise ValueError(
                    f"{name} is listed before FreezeQK, so it would average weights before they are put back; list "
                    f"FreezeQK before {name}"
                )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            penalizes = isinstance(other, LocAteR) and other.trains
            if not penalizes and not isinstance(other, (QKClip, QKWeightDecay)):
                continue
            both = [
                layer.name
                for layer in attention_layers(pl_module, other.where, other.layers, other.exclude)
                if layer.name in frozen
            ]
            if both:
                raise ValueError(
                    f"FreezeQK would undo whatever {type(other).__name__} does to {', '.join(both)}; drop one of the "
                    "two, or keep their layers apart (where=, layers=, exclude=)"
                    + (", or set observe_only=True" if penalizes else "")
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in on_fit_start: some strategies load the checkpoint after it.
        self._initial = [parameter.detach().clone() for parameter, _ in self._entries]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        for parameter, mask in self._entries:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(mask, 0.0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._forget()
        for optimizer in filter(calls_step_hooks, trainer.optimizers):  # a batch may take several steps
            self._hooks.callback(optimizer.register_step_post_hook(self._put_back).remove)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._put_back()

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer | None = None, *_: object) -> None:
        stepped = None if optimizer is None else held_parameters([optimizer])
        for (parameter, mask), initial in zip(self._entries, self._initial, strict=True):
            if stepped is None or id(parameter) in stepped:  # a graph may hold those of others
                parameter.copy_(torch.where(mask, initial, parameter))
