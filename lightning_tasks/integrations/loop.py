"""What stands before our callbacks for a trainer and its module, where there are none: a model and its optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import is_
from types import SimpleNamespace, TracebackType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from attention_modules.kernels import transforms_active, untransformed
from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.callbacks import (
    AttentionDiversification,
    AttentionMonitor,
    DAMPenalty,
    EntropyRegularizer,
    LocAteR,
    LogitMonitor,
    QKClip,
    SpectrumMonitor,
)
from lightning_tasks.callbacks.base import held_parameters, kinds_of
from lightning_tasks.callbacks.monitoring.names import to_numbers
from lightning_tasks.callbacks.monitoring.observer import LayerObserver
from lightning_tasks.callbacks.monitoring.own_hook import OwnHook
from lightning_tasks.integrations.passes import (
    Gradients,
    closure_of,
    gradients_of,
    has_numbers,
    have_changed,
    in_functional_call,
    is_probe,
    steps_by_scaler,
    tensors_of,
)
from lightning_tasks.training.eager import finish_eagerly

Log = Callable[..., Any]
_WATCH = (AttentionMonitor, LogitMonitor, SpectrumMonitor)
_PENALTIES = (LocAteR, EntropyRegularizer, AttentionDiversification, DAMPenalty)
_ACT = (*_PENALTIES, QKClip)
STEP = "step"  # in the state of a loop
_OF_DEEPSPEED = ("deepspeed.runtime.", "accelerate.utils.deepspeed")


class _Here:
    """A strategy: this process, and those beside it where there are any."""

    def reduce(self, tensor: Tensor, reduce_op: str = "sum", **_: Any) -> Tensor:
        if distributed.is_available() and distributed.is_initialized():
            tensor = tensor.clone()
            distributed.all_reduce(tensor, getattr(distributed.ReduceOp, reduce_op.upper()))
        return tensor


class FSDPStrategy(_Here):
    """Of a model that callbacks refuse by the strategy's name, as they do in Lightning."""


class DeepSpeedStrategy(_Here):
    """As :class:`FSDPStrategy`."""


def _strategy_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> _Here:
    """By what the model is in, or its optimizers: of DeepSpeed's, transformers' Trainer gives the model inside."""
    kinds = set().union(*map(kinds_of, model.modules()))
    if "FullyShardedDataParallel" in kinds:
        return FSDPStrategy()
    inside = any(type(each).__module__.startswith(_OF_DEEPSPEED) for each in optimizers)
    return DeepSpeedStrategy() if inside or "DeepSpeedEngine" in kinds else _Here()


class _Pending:
    """A logger: keeps what monitors log of a step until the step's end."""

    save_dir = log_dir = None

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.values.update(metrics)


class _View(pl.LightningModule):
    """The user's model as a module that a trainer trains; layers have their names there."""

    def __init__(self, model: nn.Module, loop: Loop) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._trainer: Any = loop

    @property
    def device(self) -> torch.device:
        """Of the first Parameter."""
        return next(self.parameters()).device

    def log(self, name: str, value: Any, *_: Any, logger: bool = True, **__: Any) -> None:  # type: ignore[override]
        """Keep a value until the step's end."""
        if logger:
            self._trainer.logged[name] = torch.as_tensor(value).detach()


class Loop:
    """Runs callbacks of ours while a loop trains a model: at its forward passes, backward passes and steps.

    A batch begins with a forward pass of the model that trains (in training mode, with gradients), and ends with the
    step of all optimizers, or before the next such pass where there was a backward pass.

    Args:
        model: that the loop trains.
        callbacks: what runs; at validations nothing does.
        log: called with a dictionary of numbers, and ``step=``, after each step of which there is something.
        optimizers: that train the model.
        accumulate: batches that a step has.
        scaler: of the loss, in float16.

    Raises:
        ValueError: a callback is none that runs here, or needs the optimizer; when it begins, as they do when a fit
            starts; at a step, if penalties enter by another number of backward passes or scale than the loss.
    """

    sanity_checking = False
    enable_validation = fast_dev_run = True  # of the latter, callbacks write no files
    max_steps = max_epochs = -1
    limit_train_batches = 1.0
    num_training_batches = float("inf")
    estimated_stepping_batches = float("inf")
    log_dir = default_root_dir = None

    def __init__(
        self,
        model: nn.Module,
        callbacks: Sequence[pl.Callback],
        log: Log | None = None,
        optimizers: Sequence[Optimizer] = (),
        accumulate: int = 1,
        scaler: Any = None,
    ) -> None:
        self.strategy = _strategy_of(model, optimizers)
        optimizers, scaler = _unwrapped(optimizers, scaler)
        _check(callbacks, optimizers)
        self.model, self.callbacks, self.optimizers = model, [*callbacks], optimizers
        self.accumulate_grad_batches = check_integer("accumulate", accumulate, 1)
        self._adds = any(isinstance(each, _PENALTIES) for each in callbacks)
        self._acts = any(isinstance(each, _ACT) for each in callbacks)
        self.state = SimpleNamespace(fn="fit", status="running")
        self.precision_plugin = SimpleNamespace(scaler=scaler)
        self.loggers = [_Pending()]
        self.logged: dict[str, Tensor] = {}
        self.callback_metrics: dict[str, Tensor] = {}
        several = distributed.is_available() and distributed.is_initialized()
        self.world_size = distributed.get_world_size() if several else 1
        self.is_global_zero = not several or distributed.get_rank() == 0
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
        self.passes = 0
        self._log = log
        self._view = _View(model, self)
        self._hooks = ExitStack()
        self._resumed: dict[str, Any] | None = {}  # None within the block
        self._in_batch = self._went_back = self._in_backward = self._in_step = False
        self._backward_passes = 0
        self._since_step = defaultdict[int, int](int)  # of those, how many reached an optimizer since its last step
        self._gradients: dict[int, Gradients] = {}  # of optimizers, as this backward pass began
        self._seen = defaultdict[int, int](int)  # of all, how many before an optimizer's last step
        self._stepped: set[int] = set()  # optimizers, in this batch
        self._steps = 0  # of them, in all
        self._foreign: dict[int, int] = {}  # of optimizers that nobody named: how many there were when a step began
        self._told = self._paused = False
        self._own: list[nn.Parameter] = []  # the model's, of the last call with its own

    @property
    def global_step(self) -> int:
        """Steps so far."""
        return int(self.fit_loop.epoch_loop._batches_that_stepped)

    def state_dict(self) -> dict[str, Any]:
        """The step, and what callbacks keep for a run that goes on, as where LocAteR began; save it with the model."""
        return {STEP: self.global_step} | self.callback_states()

    def callback_states(self) -> dict[str, Any]:
        """What callbacks keep, where there is anything."""
        return {each.state_key: state for each in self.callbacks if (state := each.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, when the block begins.

        Raises:
            RuntimeError: within the block.
        """
        if self._resumed is None:
            raise RuntimeError("load_state_dict() comes before the block: w = watch(...), w.load_state_dict(), with w:")
        self._resumed = dict(state_dict)

    def __enter__(self) -> Loop:
        """Begin, as a fit does."""
        try:
            self._call("setup", "fit")
            resumed = self._resumed or {}
            self.fit_loop.epoch_loop._batches_that_stepped = resumed.get(STEP, self.global_step)
            for each in self.callbacks:
                if each.state_key in resumed:
                    each.load_state_dict(resumed[each.state_key])
            self._view.configure_model()
            self._call("on_fit_start")
            self._call("on_train_start")
        except BaseException as error:
            self._call("on_exception", error)
            raise
        self._resumed, self._own = None, [*self.model.parameters()]
        open_hook = self._hooks.callback
        before, after = (OwnHook(self.model, hook) for hook in (self._before_forward, self._after_forward))
        open_hook(self.model.register_forward_pre_hook(before, prepend=True).remove)
        open_hook(self.model.register_forward_hook(after).remove)
        # Those of all optimizers run after an optimizer's own, by which QKClip clips.
        open_hook(register_optimizer_step_pre_hook(self._before_step).remove)
        open_hook(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, as a fit does, or as one that an error ends."""
        self._hooks.close()
        self._resumed = {}
        self._pause(False)
        if error is not None:
            self._in_batch, self._stepped = False, set()
            self._since_step.clear()
            self._call("on_exception", error)
            return
        self._end_batch()
        for name in ("on_train_end", "on_fit_end"):
            self._call(name)
        self._call("teardown", "fit")

    def _call(self, name: str, *arguments: Any) -> None:
        for each in self.callbacks:
            getattr(each, name)(self, self._view, *arguments)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        for each in (each for each in self.callbacks if isinstance(each, LayerObserver)):
            each.paused = paused

    @torch.compiler.disable(recursive=False)
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        self._begin_call(model)
        finish_eagerly()

    @torch.compiler.disable
    def _begin_call(self, model: nn.Module) -> None:
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._in_backward, self._went_back = False, True  # an error has ended that backward pass
        trains = model.training and torch.is_grad_enabled() and self._has_its_own()
        self._pause(not trains)
        if not trains or self._in_backward:
            return
        if self._in_batch and self._went_back:
            self._end_batch()
        if not self._in_batch:
            self.passes += 1
            self._in_batch, self._went_back = True, False
            self._call("on_train_batch_start", None, self.passes - 1)

    def _has_its_own(self) -> bool:
        """Whether a call computes with the model's own weights, as one by `functional_call` may not."""
        now = [*self.model.parameters()]
        if (len(now) != len(self._own) or not all(map(is_, now, self._own))) and in_functional_call():
            return False
        self._own = now
        return not transforms_active()

    @torch.compiler.disable
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward or not torch.is_grad_enabled():
            return
        if all(untransformed(each) is each for each in tensors_of(output)):  # else they are of torch.func
            # Here, as functional_call puts others in the place of Parameters while the model runs.
            trained = [each for each in model.parameters() if each.requires_grad] if self._acts else []
            nodes = [get_gradient_edge(each).node for each in trained]
            for each in tensors_of(output):
                if each.grad_fn is not None:  # hooks of what outlives the pass, as a Parameter, would pile up
                    each.register_hook(partial(self._begin_backward, nodes, self._paused))

    def _begin_backward(self, nodes: Sequence[Any], paused: bool, gradient: Tensor) -> None:
        if self._resumed is not None:  # the block is over
            return
        self._pause(paused)  # as in the forward pass: checkpoints call layers again
        if self._in_backward or not self._in_batch or is_probe(nodes):
            return
        self._in_backward = True
        self._backward_passes += 1
        gone = [each for each in self.optimizers if self._acts and not self._has_gradients(each)]
        for optimizer in gone:
            self._since_step[id(optimizer)] = 0
            for each in (each for each in self.callbacks if isinstance(each, QKClip)):
                each.forget_earlier(optimizer)
        self._gradients = {id(each): gradients_of(each) for each in self.optimizers} if self._acts else {}
        self._call("on_before_backward", gradient)
        # Queued once more at the end: by then DistributedDataParallel has queued its own, which joins the gradients.
        at_end = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        at_end(lambda: at_end(self._end_backward))

    def _end_backward(self) -> None:
        self._in_backward, self._went_back = False, True
        self._call("on_after_backward")
        if not self._acts:
            return
        # Where no gradient changes, as in FSDP2's passes that are not synchronized, they are kept elsewhere.
        reached = [each for each in self.optimizers if have_changed(self._gradients[id(each)], gradients_of(each))]
        reached, self._gradients = reached or self.optimizers, {}
        for optimizer in reached:
            self._since_step[id(optimizer)] += 1
        # A share in each backward pass: whatever scales, clips or drops gradients treats it as the loss's own.
        share, scaler = 1 / self.accumulate_grad_batches, self.precision_plugin.scaler
        first = any(self._since_step[id(each)] == 1 for each in reached)
        for each in (each for each in self.callbacks if isinstance(each, LocAteR)):
            each.enter(self, self._view, reached, share, scaler, first)  # type: ignore[arg-type]

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether some are left of earlier backward passes; else their step was taken, or given up."""
        left = [each.grad for each in held_parameters([optimizer]).values() if each.grad is not None]
        # To look for zeros waits for the device; where more passes would follow than a step has, it matters.
        few = self._since_step[id(optimizer)] < self.accumulate_grad_batches
        return any(few or has_numbers(each) for each in left)

    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self._trains(optimizer):
            self._foreign[id(optimizer)] = self._steps
            return
        if torch._C._current_graph_task_id() == -1:  # else an error has ended that backward pass
            self._in_backward = False
        self._in_step = True
        self._steps += 1
        if self._seen[id(optimizer)] == self._backward_passes and not closure_of(*arguments):
            self._refuse_unseen(optimizer)
        self._seen[id(optimizer)] = self._backward_passes
        if self._adds:
            self._refuse_hidden(optimizer)
        for each in self.callbacks:
            if not isinstance(each, LocAteR):  # its share has entered with the backward passes
                each.on_before_optimizer_step(self, self._view, optimizer)  # type: ignore[arg-type]

    def _warn_of_unseen(self, optimizer: Optimizer) -> None:
        """Say that a step, by an optimizer that nobody named, of what a named one trains is none of those seen."""
        within = self._in_step or self._foreign.get(id(optimizer)) != self._steps
        stepped = held_parameters([optimizer]).keys()
        outer = [each for each in self.optimizers if held_parameters([each]).keys() & stepped]
        if outer and not within and not self._told:
            self._told = True
            named = type(outer[0]).__name__
            rank_zero_warn(
                f"{type(optimizer).__name__} steps what {named}, given as optimizer=, trains, and is not seen: if "
                f"{named}.step() is never called, give the optimizer inside it (its base_optimizer)"
            )

    def _refuse_unseen(self, optimizer: Optimizer) -> None:
        """Refuse a step by gradients of the model of which no backward pass was seen, where a callback is to act."""
        names = ", ".join(type(each).__name__ for each in self.callbacks if isinstance(each, _ACT))
        own = {id(each) for each in self.model.parameters()}
        held = (each.grad for group in optimizer.param_groups for each in group["params"] if id(each) in own)
        if names and any(gradient is not None and has_numbers(gradient) for gradient in held):
            raise ValueError(
                f"{names} saw nothing of this step: no backward() came from an output of the model. Call the model "
                "itself (not its parts, nor through torch.func), in training mode, have it return tensors, and "
                "call backward() (gradients of torch.autograd.grad() do not count, nor those that a loss takes by "
                "itself, as GradCache)"
            )

    def _refuse_hidden(self, optimizer: Optimizer) -> None:
        """Refuse a step of more backward passes than were said, within one, or by a scaler that nobody named."""
        if self._in_backward:
            raise ValueError(
                "a step within the backward pass has gradients without what callbacks add, which comes at its end: "
                "call step() behind backward()"
            )
        passes, said = self._since_step[id(optimizer)], self.accumulate_grad_batches
        if passes > said:
            raise ValueError(
                f"a step has {passes} backward passes, and accumulate is {said}: give accumulate={passes} where each "
                f"loss is divided by {passes}, as of {passes} batches; else add the losses up, and call "
                "backward() once. A loss that takes gradients by itself, as GradCache, needs Lightning's trainer"
            )
        if self.precision_plugin.scaler is None and steps_by_scaler():
            raise ValueError(
                "a GradScaler makes this step, and what callbacks add to gradients must be scaled as the loss: give "
                "scaler=, the same one"
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._trains(optimizer):
            self._warn_of_unseen(optimizer)
            return
        self._in_step = False
        self._since_step[id(optimizer)] = 0
        self._own = [*self.model.parameters()]  # load_state_dict(assign=True) gives it others
        if self._in_batch:
            self._stepped.add(id(optimizer))
            if len(self._stepped) >= len(self.optimizers):
                self._end_batch()

    def _trains(self, optimizer: Optimizer) -> bool:
        if self.optimizers:
            return any(optimizer is each for each in self.optimizers)
        own = {id(each) for each in self.model.parameters()}
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])

    def _end_batch(self) -> None:
        if not self._in_batch:
            return
        self._in_batch, stepped = False, bool(self._stepped)
        self._stepped = set()
        self._call("on_train_batch_end", None, None, self.passes - 1)
        step = self.global_step
        values = self.loggers[0].values | to_numbers({name: each.float() for name, each in self.logged.items()})
        self.loggers[0].values, self.logged = {}, {}
        self.fit_loop.epoch_loop._batches_that_stepped += stepped
        if values and self._log is not None and self.is_global_zero:
            self._log(values, step=step)


def _check(callbacks: Sequence[pl.Callback], optimizers: Sequence[Optimizer]) -> None:
    for each in callbacks:
        name = type(each).__name__
        if not isinstance(each, (*_WATCH, *_ACT)):
            known = ", ".join(kind.__name__ for kind in (*_WATCH, *_ACT))
            raise ValueError(f"callbacks has {name}, and here run only {known}; others need Lightning's trainer")
        if isinstance(each, _ACT) and not optimizers:
            raise ValueError(f"{name} changes gradients or weights: give the optimizer that trains them, as optimizer=")


def _unwrapped(optimizers: Sequence[Optimizer], scaler: Any) -> tuple[list[Optimizer], Any]:
    """What steps, and by which scaler: accelerate's optimizers hold both."""
    found: list[Optimizer] = []
    for each in optimizers:
        while isinstance(inner := getattr(each, "optimizer", None), Optimizer):
            scaler, each = getattr(each, "scaler", None) if scaler is None else scaler, inner
        found.append(each)
    return found, scaler


def watch(
    model: nn.Module,
    every: int = 100,
    log: Log | None = None,
    callbacks: Sequence[pl.Callback] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = (),
    accumulate: int = 1,
    scaler: Any = None,
) -> Loop:
    """Watch attention while any loop trains a model: ``with watch(model, every=100, log=wandb.log): ...``.

    Args:
        model: that the loop calls, in training mode; with `DistributedDataParallel` or accelerate, either form of it.
        every: optimizer steps from one observed batch to the next, of the monitor that runs where no callbacks are
            given, an :class:`~attnswap.callbacks.AttentionMonitor`.
        log: called as ``log({"attention/entropy/layer_00": 2.1, ...}, step=100)``; prints where None.
        callbacks: monitors, regularizers and stabilizers of :mod:`attnswap.callbacks`.
        optimizer: that trains the model, or several; needed by callbacks that change gradients or weights (LocAteR,
            EntropyRegularizer, QKClip). Those that accelerate prepared bring their scaler.
        accumulate: backward passes that a step has, and by whose number the loss is divided.
        scaler: `torch.amp.GradScaler` of the loss, in float16.

    Raises:
        ValueError: a callback is none that runs here, or needs the optimizer; when the block begins, as the callbacks
            do when a fit starts; at a step, if penalties would enter by another number of backward passes, or another
            scale, than the loss.

    Example:
        >>> import torch, attnswap
        >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
        >>> optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        >>> with attnswap.watch(model, every=1, log=lambda values, step: seen.append(step)):
        ...     for _ in range(2):
        ...         model(torch.randn(4, 5, 16)).square().mean().backward()
        ...         optimizer.step()
        >>> seen
        [0, 1]
    """
    given = [AttentionMonitor(every)] if callbacks is None else [*callbacks]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*(optimizer or ())]
    return Loop(model, given, _print if log is None else log, optimizers, accumulate, scaler)


def _print(values: Mapping[str, float], step: int) -> None:
    print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
