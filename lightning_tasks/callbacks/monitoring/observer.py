"""Callbacks that hook layers of a model for one batch, and let go of them whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from attention_modules import AttentionMechanism, AttentionSwapError
from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.kernels import untransformed
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import make_observable, make_plain
from lightning_tasks.callbacks.base import Callback, Where, check_alone, refuse_flat_shards
from lightning_tasks.callbacks.monitoring.names import listed
from lightning_tasks.callbacks.monitoring.own_hook import OwnHook
from lightning_tasks.training.configure_hook import after_configure_model, forget_actions
from lightning_tasks.training.eager import draws_otherwise, drops_out, eager
from lightning_tasks.training.limits import check_layer_choice

ForwardPreHook = Callable[..., Any]  # what it returns, if anything, replaces the arguments of the call


class LayerObserver(Callback):
    """Hooks what subclasses choose, without compiled code, until :meth:`_unhook`, a trainer's end or an exception.

    A base of several monitors, which may stand side by side, is declared with ``shared=True``.

    Args:
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if ``layers`` are no integers; when a trainer starts, if it has a second such callback, also of a
            class derived from it, or the strategy is FSDP1 or DeepSpeed.
    """

    paused = False
    """Whether calls pass by unseen, as those of a validation between the passes of a batch."""
    monitor: ClassVar[type[LayerObserver]]
    """The class that observes, also of one that a user derives from it: a trainer has one of it."""

    def __init_subclass__(cls, shared: bool = False, **options: Any) -> None:
        """Note which class observes: the first below those that are ``shared`` bases of several."""
        super().__init_subclass__(**options)
        if not shared and not hasattr(cls, "monitor"):
            cls.monitor = cls

    def __init__(self, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__()
        self.where, self.layers, self.exclude = check_layer_choice(where, layers, exclude)
        self._hooks: ExitStack | None = None
        self._drops = False  # whether the model that trains has dropout, of which nothing is told yet

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, getattr(self, "monitor", type(self)))
        refuse_flat_shards(trainer, f"{type(self).__name__} cannot observe layers")
        self._drops = stage == "fit" and drops_out(pl_module)
        self._close_unread()  # of a trainer that ended before it could tell

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close_unread()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close_unread()

    def _chosen(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        return attention_layers(pl_module, self.where, self.layers, self.exclude)

    def _hook(self, hooks: Iterable[tuple[nn.Module, ForwardPreHook]]) -> ExitStack:
        """Hook modules; what is returned is closed by :meth:`_unhook`."""
        self._unhook()  # of a batch that was skipped before its end
        if self._drops and draws_otherwise():
            self._drops = False
            rank_zero_warn(
                f"{type(self).__name__}: in a batch that it observes compiled code runs eagerly, whose dropout draws "
                "other random numbers, so that this run is another one than without it: before compiling, set "
                "torch._inductor.config.fallback_random = True"
            )
        self._hooks = opened = ExitStack()
        for module, hook in hooks:
            own = OwnHook(module, self._seen_calls(hook))
            opened.callback(module.register_forward_pre_hook(own, with_kwargs=True).remove)
        opened.enter_context(eager())
        return opened

    def _seen_calls(self, hook: ForwardPreHook) -> ForwardPreHook:
        """A hook that passes calls within ``torch.func`` by: what it kept of them would outlive the transform."""

        @torch.compiler.disable  # a loop may have compiled the model, and torch 2.9 fails in what a monitor does
        def passing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            unseen = self.paused or any(untransformed(each) is not each for each in given)
            return None if unseen else hook(module, args, kwargs)

        return passing

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.close()

    def _forget(self) -> None:
        """Forget what was seen."""

    def _close_unread(self) -> None:
        """Unhook and forget, with nothing computed: after an error that may fail too, and hide the error."""
        self._unhook()
        self._forget()


# Softmax attention that observers put into plain layers, and who watches it for which trainer: the last takes it out.
# Weak, so that no model, callback or trainer that is gone without an end counts.
Watchers = WeakKeyDictionary["MechanismObserver", "ref[Any]"]
_WATCHED: WeakKeyDictionary[AttentionMechanism, Watchers] = WeakKeyDictionary()


def is_watched(layer: nn.Module) -> bool:
    """Whether an observer alone put softmax attention into the layer, which nobody asked to swap."""
    mechanism = getattr(layer, "mechanism", None)
    return isinstance(mechanism, AttentionMechanism) and mechanism in _WATCHED


def _runs(trainer: Any) -> bool:
    return getattr(getattr(trainer, "state", None), "status", None) == "running"


class MechanismObserver(LayerObserver, shared=True):
    """Hooks mechanisms; plain layers have softmax attention, which changes no output, while the trainer runs.

    It is put in after the model is built, and taken out at the trainer's end, also where that is an exception, by the
    last observer that leaves. Layers that were swapped otherwise stay as they are.
    """

    _left_alone: frozenset[str] | set[str] = frozenset()  # names of layers with hooks of users

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._watches(stage):
            after_configure_model(pl_module, self, self._make_observable)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._leave(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._leave(pl_module)

    def _watches(self, stage: str) -> bool:
        """Whether there is anything to observe while a trainer does this ("fit", "validate", "test", "predict")."""
        raise NotImplementedError

    def _chosen(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        return [layer for layer in super()._chosen(pl_module) if layer.name not in self._left_alone]

    def _make_observable(self, pl_module: pl.LightningModule) -> None:
        self._leave_hooked_alone(pl_module)
        plain = [layer.name for layer in self._chosen(pl_module) if layer.mechanism is None]
        try:
            make_observable(pl_module, plain)
        except AttentionSwapError as error:
            name = type(self).__name__
            raise AttentionSwapError(f"{name} shows a plain layer as softmax attention: {error}") from error
        trainer = pl_module.trainer
        for layer in self._chosen(pl_module):
            mechanism = self._mechanism(layer)
            if layer.name in plain or mechanism in _WATCHED:
                # Without those of an earlier trainer, which may have ended before they could leave.
                known = _WATCHED.get(mechanism, Watchers())
                here = {other: of for other, of in known.items() if of() is trainer or _runs(of())}
                _WATCHED[mechanism] = WeakKeyDictionary({**here, self: ref(trainer)})

    def _leave_hooked_alone(self, pl_module: pl.LightningModule) -> None:
        """Watch no plain layer in which a user's hooks see the attention map, and would see none then.

        Raises:
            ValueError: if no layer is left to watch.
        """
        self._left_alone = set()
        plain = [layer for layer in self._chosen(pl_module) if layer.mechanism is None]
        hooked = {layer.name: layer.host.silenced(layer.module, SoftmaxAttention.gives_weights) for layer in plain}
        self._left_alone = {name for name, hooks in hooked.items() if hooks}
        if not self._left_alone:
            return
        names = listed({name: ", ".join(hooks) for name, hooks in hooked.items() if hooks})
        text = f"{type(self).__name__}: hooks on modules in {names} see the attention map, and would see none beside it"
        if not self._chosen(pl_module):
            raise ValueError(f"{text}; no other layer is left to watch: remove the hooks, or this callback")
        rank_zero_warn(f"{text}: it leaves these layers alone")

    def _leave(self, pl_module: pl.LightningModule) -> None:
        """Leave the model, and take softmax out of the layers that nobody else watches."""
        forget_actions(pl_module, self)
        alone: list[str] = []
        for name, module in pl_module.named_modules():
            if is_watched(module):
                watchers = _WATCHED[module.mechanism]
                watchers.pop(self, None)
                if not watchers:
                    alone.append(name)
        if alone:
            make_plain(pl_module, alone)

    def _mechanism(self, layer: AttentionLayer) -> AttentionMechanism:
        if layer.mechanism is None:
            raise ValueError(
                f"{type(self).__name__}: {layer.name!r} became plain attention after the model was configured, and "
                "cannot be observed; do not restore or replace layers while the trainer runs"
            )
        return layer.mechanism
