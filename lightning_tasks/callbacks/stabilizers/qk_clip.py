"""QK-clip after each optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from attention_modules import AttentionMechanism
from attention_modules.analysis import largest_logit, logit_bound
from attention_modules.stabilizers.clip import LogitScaler, clip_factors, clip_refusal, shared_elsewhere
from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.names import listed
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.training.limits import check_integer, check_number


class QKClip(QueryKeyObserver):
    """Shrinks W_q and W_k of the heads whose largest logit passed tau, after each optimizer step (Kimi K2, 2025).

    S is the largest scale · q·k of a head over all batches of the step and all processes. With γ = min(1, tau / S), W_q
    and its bias take the factor γ^alpha, W_k and its bias γ^(1 - alpha); heads that share a key head take the smallest
    γ among them. A mechanism without a query has the logits k kᵀ, and its W_k takes γ^½, as does a weight that is both
    W_q and W_k. A weight that several layers share is multiplied once, by the smallest factor that one of them asks
    for. Heads within the limit keep every bit, as do values. Released code (Megatron-LM) scales the weights alone; with
    biases, the logits of the same tokens are at most tau after the clip. The loss and its gradients are not touched,
    and neither is the optimizer's state.

    Logs ``qk_clip/clipped_heads``, how many key heads were clipped in the step.

    On the CPU a layer whose queries and keys are too short for such a logit is not looked at further; on other devices
    the product of queries and keys is computed at every observed step, without waiting for the device. An observed step
    runs without ``torch.compile``: a larger ``every_n_steps`` keeps its speed.

    Args:
        tau: limit of the logits.
        alpha: the query's share of the factor, from 0 to 1.
        every_n_steps: optimizer steps from one at which logits are looked at to the next.
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if a number is out of its limits; when the fit starts, if no layer matches, the trainer has a second
            ``QKClip``, the strategy is FSDP1 or DeepSpeed, or a layer's logits do not follow the scale of W_q and W_k
            (q/k norm, ``l2`` and further mechanisms), or these weights are frozen, computed, sharded or shared with
            what is not clipped.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import QKClip
        >>> trainer = Trainer(callbacks=[QKClip(tau=100.0)], logger=False)
    """

    def __init__(
        self,
        tau: float = 100.0,
        alpha: float = 0.5,
        every_n_steps: int = 1,
        where: Where = None,
        layers: list[int] | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(where, layers, exclude)
        self.tau = check_number("tau", tau, minimum=0.0)
        if not self.tau:
            raise ValueError("tau must be above 0, got 0: no logit could be positive")
        self.alpha = check_number("alpha", alpha, minimum=0.0, maximum=1.0)
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self._largest: list[Tensor | None] = []  # of each layer, [H], since the last step of this process
        self._joined: Tensor | None = None  # of all processes, [layers, H]
        self._scaler: tuple[list[AttentionMechanism | None], LogitScaler] | None = None  # of these mechanisms

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(pl_module)  # refused here, before anything is written

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._check(pl_module)  # again: the module may have frozen weights since
        self._scaler = None
        self._start_step()

    def _check(self, pl_module: pl.LightningModule) -> None:
        layers = self._chosen(pl_module)
        refused = {layer.name: reason for layer in layers if (reason := clip_refusal(layer))}
        if refused := refused or shared_elsewhere(pl_module, layers):
            raise ValueError(f"QKClip cannot clip {listed(refused)}; leave such layers out (exclude=)")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if current_step(trainer) % self.every_n_steps == 0:
            self._open()

    def _see(self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: Any) -> None:
        if self._in_backward or not len(query):
            return
        # Reads a number: on the CPU, that waits for no device.
        if query.device.type == "cpu" and bool((logit_bound(query, key, given["scale"]) <= self.tau).all()):
            return
        seen, before = largest_logit(query.detach(), key.detach(), **given).amax(0), self._largest[index]
        self._largest[index] = seen if before is None else torch.maximum(before, seen)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # Here and not in a hook of batches: every process comes to a step together.
        if self._hooks is not None:
            self._joined = trainer.strategy.reduce(self._stacked(pl_module.device), reduce_op="max")  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unhook()
        if self._joined is not None:
            pl_module.log("qk_clip/clipped_heads", self._clip(self._joined))
            self._start_step()

    def _clip(self, largest: Tensor) -> Tensor:
        """Clip every layer by its heads' largest logits, ``[layers, H]``; the number of key heads that were clipped."""
        of_layers = zip(self._layers, largest, strict=True)
        factors = [
            clip_factors(of_heads[: layer.spec.num_heads], self.tau, layer.host.groups(layer.module))
            for layer, of_heads in of_layers
        ]
        mechanisms = [layer.mechanism for layer in self._layers]
        if self._scaler is None or self._scaler[0] != mechanisms:  # a swap may leave other rows
            self._scaler = mechanisms, LogitScaler(self._layers, self.alpha)
        return self._scaler[1].scale(factors).sum().to(largest.dtype)

    def _stacked(self, device: torch.device) -> Tensor:
        """``[layers, H]``, -inf where nothing was seen that could pass the limit."""
        heads = max(layer.spec.num_heads for layer in self._layers)
        stacked = torch.full((len(self._layers), heads), float("-inf"), device=device)
        for row, seen in zip(stacked, self._largest, strict=True):
            if seen is not None:
                row[: len(seen)] = seen
        return stacked

    def _start_step(self) -> None:
        self._largest, self._joined = [None] * len(self._layers), None
