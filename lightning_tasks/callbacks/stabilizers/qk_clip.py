"""QK-clip after each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from attention_modules import AttentionMechanism
from attention_modules.analysis import largest_logit, logit_bound
from attention_modules.hosts import AttentionLayer
from attention_modules.mechanisms.shared.options import check_integer, check_number
from attention_modules.stabilizers.clip import (
    LogitScaler,
    clip_factors,
    clip_refusal,
    query_key_weights,
    shared_elsewhere,
)
from attention_modules.stabilizers.followed import follows_scale
from lightning_tasks.callbacks.base import (
    Where,
    calls_step_hooks,
    check_step_hooks,
    gives_up_gradients,
    held_parameters,
    unfreezes_later,
)
from lightning_tasks.callbacks.monitoring.names import listed
from lightning_tasks.callbacks.monitoring.observer import ForwardPreHook
from lightning_tasks.callbacks.stabilizers.observer import QueryKeyObserver
from lightning_tasks.runs.loggers import current_step

_FAR = 2.0**10  # a factor at which a clamp acts that may act at all


class QKClip(QueryKeyObserver):
    """Shrinks W_q and W_k of the heads whose largest logit passed tau, after each optimizer step (Kimi K2, 2025).

    S is the largest scale · q·k of a head over all processes and all calls through which gradients of the step went. A
    batch that is skipped before its backward pass does not count. With γ = min(1, tau / S), W_q and its bias take the
    factor γ^alpha, W_k and its bias γ^(1 - alpha); heads that share a key head take the smallest γ among them. A
    mechanism without a query has the logits k kᵀ, and its W_k takes γ^½, as does a weight that is both W_q and W_k. A
    weight that several layers share is multiplied once, by the smallest factor that one of them asks for. Heads within
    the limit keep every bit, as do values. Released code (Megatron-LM) scales the weights alone; with biases, the
    logits of the same tokens are at most tau after the clip. The loss and its gradients are not touched, and neither
    is the optimizer's state.

    Of several optimizers each clips the layers whose W_q and W_k it holds, after its own steps, those without
    Lightning's wrapper (``self.optimizers(use_pl_optimizer=False)``) too. Weights that a step leaves as they are, as
    they were frozen meanwhile, have no gradient, or a gradient scaler or ``NonFiniteGuard`` skips the step, are not
    clipped, and what was seen before it counts in no later step.

    Logs ``qk_clip/clipped_heads``, how many key heads were clipped after the steps of a batch.

    On the CPU a layer whose queries and keys are too short for such a logit is not looked at further; on other devices
    the product of queries and keys is computed at every observed step, without waiting for the device. An observed step
    runs without ``torch.compile``: a larger ``every_n_steps`` keeps its speed.

    In the first observed batch calls on trial, in evaluation, show whether queries and keys follow the scale of W_q and
    W_k. Layers in which they do not, as something clamps them (``clip_qkv``) or adds to them, are warned of. Every
    observed call of these runs on trial too, and is waited for.

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
            (q/k norm, ``l2`` and further mechanisms), or these weights are frozen (unless a ``BaseFinetuning`` of
            Lightning may train them later), computed, sharded or shared with what is not clipped, or their optimizer
            calls no hooks of steps. Weights that no optimizer of the trainer holds are never clipped: a warning.
        ValueError: in the backward pass of the process that meets it, if a logit above tau is of queries or keys that
            do not follow the scale of W_q and W_k.

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
        self.tau = check_number("tau", tau, 0.0)
        if not self.tau:
            raise ValueError("tau must be above 0, got 0: no logit could be positive")
        self.alpha = check_number("alpha", alpha, 0.0, 1.0)
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self._largest: list[Tensor | None] = []  # of each layer, [H], since its last step, in this process
        self._current: list[Tensor | None] = []  # the same, in this batch
        self._awaited: set[int] = set()  # layers that were looked at since their last step, in any process
        self._stepped: set[int] = set()  # those whose weights were stepped in this batch
        self._left: set[int] = set()  # those whose step began in this batch, and was not taken
        self._clipped: list[Tensor] = []  # how many key heads, in each step of this batch
        self._reached = False  # whether a step of this fit came by
        self._by_hand = False  # whether backward passes may be the module's own, which nobody tells of
        self._on_step = ExitStack()  # the hooks of optimizers
        self._straight: dict[int, bool] = {}  # whether a layer's q and k follow the scale of their weights at any size
        self._bent: set[int] = set()  # those in whose latest call they do not
        self._untried: set[int] = set()  # those whose call on trial was an error
        self._scaler: tuple[list[AttentionMechanism | None], LogitScaler] | None = None  # of these mechanisms
        self._resumed: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return self._generate_state_key(where=self.where, layers=self.layers, exclude=self.exclude)

    def state_dict(self) -> dict[str, Any]:
        """What was seen behind the last step of each layer, which counts in the next one; by the first process."""
        seen = self._awaited or any(each is not None for each in self._largest)
        return {"largest": list(self._largest), "awaited": sorted(self._awaited)} if seen else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._resumed = {}  # of an earlier fit; that of a resumed run is loaded after this

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._check(trainer, pl_module)  # refused here, before anything is written

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._check(trainer, pl_module)  # again: the module may have frozen weights since
        check_step_hooks("QKClip", filter(self._held_by, trainer.optimizers))
        self._by_hand = not pl_module.automatic_optimization
        self._scaler = None
        self._largest, self._clipped = [None] * len(self._layers), []
        self._current = [None] * len(self._layers)
        self._awaited, self._stepped, self._left = set(), set(), set()
        self._straight, self._bent, self._untried = {}, set(), set()
        self._reached = False
        self._resume(pl_module.device)
        held = set().union(*map(self._held_by, trainer.optimizers))
        if idle := {layer.name: "" for index, layer in enumerate(self._layers) if index not in held}:
            rank_zero_warn(
                f"QKClip clips after a step of one of the trainer's optimizers, and none holds the weights of "
                f"{listed(idle)}: return an optimizer of them from configure_optimizers(), or name them in exclude="
            )
        whole = set().union(*(self._held_by(each, all) for each in trainer.optimizers))
        if parted := {layer.name: "" for index, layer in enumerate(self._layers) if index in held - whole}:
            rank_zero_warn(
                f"QKClip: W_q and W_k of {listed(parted)} lie in several optimizers; where the others are toggled off "
                "at a step, they count as frozen, and nothing is clipped: give both to one optimizer"
            )

    def _resume(self, device: torch.device) -> None:
        """Take up what a checkpoint holds, if it is of as many layers and heads."""
        resumed, self._resumed = self._resumed, {}
        largest, heads = resumed.get("largest", ()), [layer.spec.num_heads for layer in self._layers]
        if len(largest) == len(heads) and all(
            seen is None or len(seen) == count for seen, count in zip(largest, heads, strict=True)
        ):
            self._largest = [None if seen is None else seen.to(device) for seen in largest]
            self._awaited = set(resumed["awaited"])

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layers, frozen = self._chosen(pl_module), unfreezes_later(trainer)
        refused = {layer.name: reason for layer in layers if (reason := clip_refusal(layer, frozen))}
        if refused := refused or shared_elsewhere(pl_module, layers):
            raise ValueError(f"QKClip cannot clip {listed(refused)}; leave such layers out (exclude=)")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._current = [None] * len(self._layers)
        if current_step(trainer) % self.every_n_steps == 0:
            self._open()
            self._awaited = set(range(len(self._layers)))
        else:
            self._forget_largest(set(range(len(self._layers))) - self._awaited)  # seen behind the last step
        self._on_step.close()  # of a batch that was skipped before its end
        for optimizer in filter(calls_step_hooks, trainer.optimizers if self._awaited else []):
            # Hooks of the optimizer, as Lightning has none after a step: a step by whomever is seen, and one that a
            # gradient scaler leaves out is not.
            after = partial(self._after_step, trainer, pl_module)
            self._on_step.callback(optimizer.register_step_post_hook(after).remove)

    def _readers(self) -> list[tuple[nn.Module, ForwardPreHook]]:
        untried = [(index, layer) for index, layer in enumerate(self._layers) if not self._straight.get(index)]
        return [*super()._readers(), *((layer.module, partial(self._try, index)) for index, layer in untried)]

    def _try(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a clip would act on what a call makes: calls on trial, of any size, else of its own, show it."""
        self._bent.discard(index)
        if not torch.is_grad_enabled():
            return
        layer, kind = self._layers[index], getattr(module, "plain_class", type(module)).__name__
        try:
            if self._straight.get(index, True):
                self._note(index, kind, follows_scale(layer, args, kwargs, _FAR, moved=True))
            bent = self._straight.get(index) is False and follows_scale(layer, args, kwargs, 0.5) is False
        except Exception as error:  # of a stranger's forward
            bent = self._straight.get(index) is False
            if not bent and index in self._untried:
                self._straight[index] = True  # it fails again
            elif not bent:
                self._untried.add(index)
                rank_zero_warn(
                    f"QKClip: {kind} cannot be called on trial ({type(error).__name__}: {error}), so that a clamp "
                    "between W_q, W_k and their product would not be found"
                )
        if bent:
            self._bent.add(index)

    def _note(self, index: int, kind: str, follows: bool | None) -> None:
        if follows is False:
            rank_zero_warn(
                f"QKClip: between W_q, W_k and their product {kind} has what does not scale with them, such as a "
                "clamp (clip_qkv) or a bias: where a logit above tau meets it, the fit ends with an error, unless such "
                "layers are left out (exclude=)"
            )
        if follows is not None:
            self._straight[index] = follows

    def _see(self, index: int, query: Tensor, key: Tensor, given: dict[str, Any], call: Any) -> None:
        # Nothing trains by a call without gradients. In the backward pass a reentrant checkpoint calls again with them;
        # the graph of another checkpoint's second call is never run, so that it does not count.
        trained = [each for each in (query, key) if each.requires_grad and torch.is_grad_enabled()]
        if not (trained and query.numel()):
            return
        # Reads a number: on the CPU, that waits for no device.
        if query.device.type == "cpu" and bool((logit_bound(query, key, given["scale"]) <= self.tau).all()):
            return
        seen = largest_logit(query.detach(), key.detach(), **given).amax(0)
        trained[0].register_hook(partial(self._count, index, seen, index in self._bent))

    def _count(self, index: int, seen: Tensor, bent: bool, *_: Tensor) -> None:
        if not (self._in_backward or self._by_hand):  # torch.autograd.grad() of somebody, for a gradient of his own
            return
        if bent and bool((clip_factors(seen, self.tau) < 1).any()):
            raise ValueError(
                f"QKClip cannot clip {self._layers[index].name!r}, whose largest logit is {seen.max():.4g} (tau "
                f"{self.tau:g}): its queries or keys are not W_q x and W_k x times a factor here. It may clamp them "
                "(clip_qkv), normalize them, add a bias to them, or read keys of earlier tokens: build the model "
                "without that, choose a larger tau, or leave the layer out (exclude=)"
            )
        for held in (self._largest, self._current):
            before = held[index]
            held[index] = seen if before is None else torch.maximum(before, seen)

    def forget_earlier(self, optimizer: Optimizer) -> None:
        """Forget what was seen before this batch of an optimizer's layers, whose gradients of then were given up."""
        for index in self._held_by(optimizer):
            self._largest[index] = self._current[index]

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if gives_up_gradients(pl_module):
            self.forget_earlier(optimizer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._reached = True
        if self._awaited:
            self._left |= self._held_by(optimizer)

    def _after_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Clip the layers whose weights an optimizer has stepped."""
        self._reached = True
        held = self._held_by(optimizer) & self._awaited
        if not held:
            return
        if torch._C._current_graph_task_id() != -1 and (parted := held - self._held_by(optimizer, all)):
            names = listed({self._layers[index].name: "" for index in parted})
            raise ValueError(
                f"QKClip: W_q and W_k of {names} lie in several optimizers, and one that steps in the backward pass "
                "would clip what that pass still reads: call step() behind backward(), or give both to one optimizer"
            )
        stepped = [index for index in held if _takes_steps(self._layers[index])]
        # Here and not in a hook of batches: every process comes to a step together.
        largest = trainer.strategy.reduce(self._stacked(stepped, pl_module.device), reduce_op="max")
        overflow = getattr(optimizer, "found_inf", None)  # a fused optimizer leaves out steps of a scaler by itself
        if overflow is not None:
            largest = torch.where(overflow.to(pl_module.device) > 0, float("-inf"), largest)  # type: ignore[arg-type]
        self._clipped.append(self._clip(largest))  # type: ignore[arg-type]
        self._forget_largest(held)
        self._stepped |= held
        self._left -= held

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unhook()
        self._forget_largest(self._left)
        self._awaited -= self._left | self._stepped
        self._left, self._stepped = set(), set()
        weight = query_key_weights(self._layers[0])[0]
        none = weight.new_zeros((), dtype=torch.float32)  # of a batch without a step, or not looked at
        pl_module.log("qk_clip/clipped_heads", sum(self._clipped, none))
        self._clipped = []

    def _unhook(self) -> None:
        super()._unhook()
        self._on_step.close()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._awaited and trainer.optimizers and not self._reached:
            rank_zero_warn(
                "QKClip has seen no step of the trainer's optimizers, so that it clips nothing: step what "
                "configure_optimizers() returns, and not an optimizer inside it"
            )

    def _held_by(self, optimizer: Optimizer, share: Callable[[Iterable[bool]], bool] = any) -> set[int]:
        """The layers whose weights an optimizer holds, any of them or all."""
        own = held_parameters([optimizer])
        return {
            index
            for index, layer in enumerate(self._layers)
            if share(id(weight) in own for weight in query_key_weights(layer))
        }

    def _forget_largest(self, layers: set[int]) -> None:
        for index in layers:
            self._largest[index] = None

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

    def _stacked(self, chosen: Sequence[int], device: torch.device) -> Tensor:
        """``[layers, H]``, -inf in layers that are not chosen, and where nothing was seen that could pass the limit."""
        heads = max(layer.spec.num_heads for layer in self._layers)
        stacked = torch.full((len(self._layers), heads), float("-inf"), device=device)
        for index in chosen:
            seen = self._largest[index]
            if seen is not None:
                stacked[index, : len(seen)] = seen
        return stacked


def _takes_steps(layer: AttentionLayer) -> bool:
    """Whether an optimizer changes a layer's weights: one that is frozen, or has no gradient, is left as it is."""
    weights = query_key_weights(layer)
    return all(weight.requires_grad for weight in weights) and any(weight.grad is not None for weight in weights)
