"""LocAteR: a small QK eigenspectrum as a training objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from attention_modules.analysis import frobenius_squared, trace, trace_squared
from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.mechanisms.shared.options import check_flag, check_number
from attention_modules.sharing import WRAPPERS
from lightning_tasks.callbacks.base import (
    Callback,
    Where,
    gives_up_gradients,
    held_parameters,
    refuse_flat_shards,
    refuse_line_search,
    reshard,
    unfreezes_later,
    whole,
)
from lightning_tasks.callbacks.monitoring.names import warn_of_caveats
from lightning_tasks.training.limits import check_layer_choice

_SCALES = {"frobenius": frobenius_squared, "trace": trace_squared}


class LocAteR(Callback):
    """Adds weight · Σ over layers and heads of ‖W‖_F² + gamma (tr W - mean_target)², W = W_qᵀ W_k, to the loss.

    The method is LocAteR (Bao, Hataya and Karakida, ICML 2024), which minimizes the scale of the QK eigenspectrum
    while it maintains its mean; the exact form of the penalty is our reading. The gradient is added to ``.grad`` just
    before each optimizer step, computed in at least fp32. That equals adding the penalty to the loss of every batch:
    Lightning clips afterwards, and a short last accumulation window gets its share. The module needs no change, and
    layers sharded by FSDP2 are gathered.

    With manual optimization a step counts in full however many backward passes it gathers, gradients that the module
    clips itself, before ``step``, are clipped without the penalty, and steps of ``self.optimizers(
    use_pl_optimizer=False)`` have none (a warning).

    Logs ``locater/penalty``, weight included, as of before the step. Where a trainer has several, say for other layers,
    the second logs ``locater/penalty_1`` and so on, in the order of the callbacks.

    Args:
        weight: factor of the penalty, at least 0.
        scale: ``"frobenius"``: ‖W‖_F²; ``"trace"``: tr W², which is unbounded below, and hence unsafe, unless W is
            symmetric.
        gamma: factor of the term that holds tr W; 0 leaves the mean free.
        mean_target: where gamma holds tr W: ``"initial"``, each head's value when the fit started (kept in
            checkpoints), or a number for all heads.
        observe_only: only log.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if an argument is out of its limits, ``scale`` unknown, or ``mean_target`` a number that no
            gamma holds; at the start of the fit, if no layer
            matches, the strategy is FSDP1 or DeepSpeed, or a layer's query and key weights are not trained (a
            warning, where a ``BaseFinetuning`` of Lightning may train them later).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import LocAteR
        >>> trainer = Trainer(callbacks=[LocAteR(0.01)], logger=False)
    """

    def __init__(
        self,
        weight: float,
        scale: Literal["frobenius", "trace"] = "frobenius",
        gamma: float = 0.0,
        mean_target: float | Literal["initial"] = "initial",
        observe_only: bool = False,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not isinstance(scale, str) or scale not in _SCALES:
            raise ValueError(f"scale must be one of {', '.join(map(repr, _SCALES))}, got {scale!r}")
        self.weight = check_number("weight", weight, 0.0)
        self.scale = scale
        self.gamma = check_number("gamma", gamma, 0.0)
        initial = isinstance(mean_target, str) and mean_target == "initial"
        self.mean_target = mean_target if initial else check_number("mean_target, if not 'initial',", mean_target)
        if not initial and not self.gamma:
            raise ValueError(f"mean_target is {mean_target}, and gamma=0 leaves the mean free: give gamma=1, say")
        self.observe_only = check_flag("observe_only", observe_only)
        self.where, self.layers, self.exclude = check_layer_choice(where, layers, exclude)
        self._layers: list[AttentionLayer] = []
        self._initial_traces: dict[str, Tensor] = {}
        self._backward_passes = 0
        self._joined: dict[int, int] = {}  # how many of them the steps of each optimizer took in
        self._reached = False  # whether a step of this fit came by

    @property
    def trains(self) -> bool:
        """Whether it changes any weight."""
        return self.weight > 0 and not self.observe_only

    @property
    def state_key(self) -> str:
        return self._generate_state_key(where=self.where, layers=self.layers, exclude=list(self.exclude))

    def state_dict(self) -> dict[str, Any]:
        return {"initial_traces": dict(self._initial_traces)} if self._initial_traces else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._initial_traces = dict(state_dict["initial_traces"])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not self.observe_only:
            refuse_flat_shards(trainer, "LocAteR cannot add to gradients")
        self._initial_traces = {}  # of an earlier fit; those of a resumed run are loaded after this

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._choose(trainer, pl_module)  # refused here, before anything is written

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.trains:
            refuse_line_search(trainer, "LocAteR")
        # Again: since on_fit_start the module may have frozen weights, and a strategy loaded the checkpoint.
        reshard(pl_module)
        self._choose(trainer, pl_module)
        self._backward_passes, self._joined = 0, {}
        self._reached = False
        warn_of_caveats("LocAteR", self._layers)
        if self._holds_initial:
            self._initial_traces = {layer.name: self._initial_trace(layer) for layer in self._layers}

    def _choose(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers = attention_layers(pl_module, self.where, self.layers, self.exclude)
        if not self.observe_only:
            self._check_trained(trainer)
        if self._holds_initial:
            for layer in self._layers:
                self._check_heads(layer)

    @property
    def _holds_initial(self) -> bool:
        return bool(self.gamma) and self.mean_target == "initial"

    def _check_trained(self, trainer: pl.Trainer) -> None:
        held = held_parameters(trainer.optimizers)
        for layer in self._layers:
            own = layer.qk_parameters()
            if not any(parameter.requires_grad and id(parameter) in held for parameter in own):
                text = (
                    f"LocAteR: the query and key weights of {layer.name!r} are frozen or in no optimizer, so the "
                    "penalty would change nothing; train them, name the layer in exclude=, or set observe_only=True"
                )
                if not unfreezes_later(trainer):
                    raise ValueError(text)
                rank_zero_warn(text)

    def _check_heads(self, layer: AttentionLayer) -> None:
        saved = self._saved_trace(layer)
        if saved is not None and saved.numel() != layer.spec.num_heads:
            raise ValueError(
                f"LocAteR: the checkpoint holds tr W of {saved.numel()} heads for {layer.name!r}, which has "
                f"{layer.spec.num_heads}; resume with the model that was saved"
            )

    def _saved_trace(self, layer: AttentionLayer) -> Tensor | None:
        """What a checkpoint holds of a layer, which may have been within a wrapper there, or is here."""
        named = {_own_name(name): each for name, each in self._initial_traces.items()} | self._initial_traces
        return named.get(layer.name, named.get(_own_name(layer.name)))

    def _initial_trace(self, layer: AttentionLayer) -> Tensor:
        """Tr W of each head at the start, ``[H]``, on the layer's device."""
        with torch.no_grad():
            now = trace(*_full_precision(layer.qk_weights()))
        saved = self._saved_trace(layer)
        return now if saved is None else saved.to(now)

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if gives_up_gradients(pl_module):  # those that no step has taken in
            self._joined[id(optimizer)] = self._backward_passes

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._backward_passes += 1

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._reached = True
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Such optimizers (fused ones) divide by the scale inside step(); all others were unscaled before this hook.
        scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        share = self._share_of_step(trainer, pl_module, optimizer)
        self.enter(trainer, pl_module, [optimizer], share, scaler if scaled else None)

    def enter(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        share: float,
        scaler: Any,
        log: bool = True,
    ) -> None:
        """Add a share of the penalty to the gradients of what optimizers hold, once, scaled as these."""
        parameters = [] if self.observe_only else self._parameters(optimizers)
        if share == 0 or not (parameters or self.observe_only):
            return
        with torch.set_grad_enabled(bool(parameters)), torch.autocast(pl_module.device.type, enabled=False):
            penalty = self.weight * self._penalty()
            if parameters and self.weight:
                _add_gradient(share * penalty if scaler is None else scaler.scale(share * penalty), parameters)
        if log:
            pl_module.log(self._name(trainer), penalty.detach())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._reached and self._backward_passes:
            rank_zero_warn(
                "LocAteR has seen no step of an optimizer, so that it adds and logs nothing: with manual optimization, "
                "call step() of what self.optimizers() gives, without use_pl_optimizer=False"
            )

    def _name(self, trainer: pl.Trainer) -> str:
        """Of its own in the logs, by its place among its kind."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
        same = [callback for callback in callbacks if isinstance(callback, LocAteR)]
        place = same.index(self) if self in same else 0  # another callback may hold it
        return f"locater/penalty_{place}" if place else "locater/penalty"

    def _share_of_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> float:
        """Backward passes since the last time, over those that the loss was divided by."""
        passes = self._backward_passes - self._joined.get(id(optimizer), 0)
        self._joined[id(optimizer)] = self._backward_passes
        return passes / trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1.0

    def _parameters(self, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
        held = held_parameters(optimizers)
        chosen = {id(p): p for layer in self._layers for p in layer.qk_parameters() if p.requires_grad}
        return [parameter for key, parameter in chosen.items() if key in held]

    def _penalty(self) -> Tensor:
        """Σ over layers and heads of the scale and the mean's term, a scalar."""
        return torch.stack([self._layer_penalty(layer) for layer in self._layers]).sum()

    def _layer_penalty(self, layer: AttentionLayer) -> Tensor:
        w_q, w_k = _full_precision(layer.qk_weights())
        penalty = _SCALES[self.scale](w_q, w_k)  # [H]
        if self.gamma:
            target = self._initial_traces[layer.name] if self.mean_target == "initial" else self.mean_target
            penalty = penalty + self.gamma * (trace(w_q, w_k) - target).square()
        return penalty.sum()


def _own_name(name: str) -> str:
    """A layer's name without what torch.compile, checkpoints, Fabric and DistributedDataParallel put around modules."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts and parts[0] in ("_forward_module", "module"):
        del parts[0]
    return ".".join(parts)


def _add_gradient(penalty: Tensor, parameters: list[nn.Parameter]) -> None:
    gradients = torch.autograd.grad(penalty, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # of a sharded one, sharded as it is
        parameter.grad.add_(gradient)


def _full_precision(weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Whole weights, those of less than 32 bits as fp32."""
    w_q, w_k = (whole(weight).to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights)
    return w_q, w_k
