"""Acting on a LightningModule between its building and everything that reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

Action = Callable[[pl.LightningModule], None]


class _Actions(dict[int, tuple[int, Action]]):
    """By the identity of their owner: that of the trainer, and the action. A copied module has none."""

    def __deepcopy__(self, memo: Any) -> _Actions:
        return _Actions()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Actions, ()


def _configure_then_run(pl_module: pl.LightningModule, previous: Callable[[], None] | None, actions: _Actions) -> None:
    if previous is None:
        type(pl_module).configure_model(pl_module)
    else:
        previous()
    for _, action in list(actions.values()):
        action(pl_module)


def _pending_actions(pl_module: pl.LightningModule) -> _Actions | None:
    hook = vars(pl_module).get("configure_model")
    return hook.args[2] if isinstance(hook, partial) and hook.func is _configure_then_run else None


def after_configure_model(pl_module: pl.LightningModule, owner: pl.Callback, action: Action) -> None:
    """Have ``action(pl_module)`` run at the end of ``configure_model``, once for each owner.

    By then the network exists, whether it was built in ``__init__``, ``setup`` or ``configure_model``; no weights
    were restored, nothing was sharded and no optimizer was built. Call it in :meth:`Callback.setup`, which Lightning
    runs before the module's own ``setup`` and ``configure_model``.
    """
    actions = _pending_actions(pl_module)
    if actions is None:
        actions = _Actions()
        previous = vars(pl_module).get("configure_model")
        # A partial, unlike a closure, can be copied and pickled with the module.
        pl_module.configure_model = partial(_configure_then_run, pl_module, previous, actions)  # type: ignore[method-assign]
    trainer = id(pl_module._trainer)
    for gone in [each for each, (of, _) in actions.items() if of != trainer]:
        del actions[gone]  # of an earlier trainer, which ended before its callbacks could tell
    actions[id(owner)] = (trainer, action)


def swap_now(pl_module: pl.LightningModule) -> None:
    """Have the trainer's callbacks swap attention now, between the building of the network and what wraps it.

    Left alone they act at the end of ``configure_model``. A module that compiles or shards its network in there (for
    Lightning's ``ModelParallelStrategy``) calls this first, as no swap may change the network afterwards. The callbacks
    then find their work done. Nothing happens without a trainer, or where no callback swaps::

        def configure_model(self):
            if self.model is None:
                self.model = build()
                swap_now(self)
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])  # or torch.compile

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> from attnswap.callbacks import swap_now
        >>> class Module(LightningModule):
        ...     def configure_model(self):
        ...         self.net = build_network()
        ...         swap_now(self)  # callbacks swap now, as the lines below shard what they find
        ...         fully_shard(self.net)
    """
    for _, action in list((_pending_actions(pl_module) or {}).values()):
        action(pl_module)


def forget_actions(pl_module: pl.LightningModule, owner: pl.Callback) -> None:
    """Undo :func:`after_configure_model` for an owner."""
    actions = _pending_actions(pl_module)
    if actions is None:
        return
    actions.pop(id(owner), None)
    if not actions:
        previous = vars(pl_module)["configure_model"].args[1]
        del pl_module.configure_model
        if previous is not None:
            pl_module.configure_model = previous  # type: ignore[method-assign]
