"""Callbacks that hook layers of a model for one batch, and let go of them whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import nn

from attention_modules import AttentionMechanism
from attention_modules.hosts import AttentionLayer, attention_layers
from attention_modules.swap import swap_attention
from lightning_tasks.callbacks.alone import check_alone
from lightning_tasks.callbacks.base import Callback, Where
from lightning_tasks.callbacks.configuring import after_configure_model, forget_actions
from lightning_tasks.callbacks.limits import check_layers
from lightning_tasks.eager import eager

ForwardPreHook = Callable[..., None]


class LayerObserver(Callback):
    """Hooks what subclasses choose, without compiled code, until :meth:`_close`, a trainer's end or an exception.

    Args:
        where: names of layers (a glob or several); all where None.
        layers: which of those, counted in module order.
        exclude: names (globs) to leave out.

    Raises:
        ValueError: if ``layers`` are no integers; when a trainer starts, if it has a second such callback.
    """

    def __init__(self, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__()
        self.where, self.layers, self.exclude = where, check_layers(layers), exclude
        self._hooks: ExitStack | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_alone(trainer, self)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _chosen(self, pl_module: pl.LightningModule) -> list[AttentionLayer]:
        return attention_layers(pl_module, self.where, self.layers, self.exclude)

    def _hook(self, hooks: Iterable[tuple[nn.Module, ForwardPreHook]]) -> None:
        if self._hooks is not None:  # of a batch that was skipped before its end
            self._hooks.close()
        self._hooks = ExitStack()
        for module, hook in hooks:
            self._hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        self._hooks.enter_context(eager())

    def _close(self) -> Any:
        """Unhook, if anything is hooked; subclasses also forget what was seen."""
        if self._hooks is not None:
            self._hooks.close()
        self._hooks = None


class MechanismObserver(LayerObserver):
    """Hooks mechanisms; plain layers get plain softmax attention, which changes no output, when a trainer starts."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        after_configure_model(pl_module, self, self._make_observable)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        forget_actions(pl_module, self)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        forget_actions(pl_module, self)

    def _make_observable(self, pl_module: pl.LightningModule) -> None:
        plain = [layer.name for layer in self._chosen(pl_module) if layer.mechanism is None]
        if plain:
            swap_attention(pl_module, "softmax", where=plain)

    def _mechanism(self, layer: AttentionLayer) -> AttentionMechanism:
        if layer.mechanism is None:
            raise ValueError(
                f"{type(self).__name__}: {layer.name!r} became plain attention after the model was configured, and "
                "cannot be observed; do not restore or replace layers while the trainer runs"
            )
        return layer.mechanism
