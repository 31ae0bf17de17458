"""What our callbacks share: a base that both Lightning packages accept, and when to act and log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import lightning.pytorch as pl
import torch
from torch import Tensor

try:
    from pytorch_lightning import Callback as _StandaloneCallback
except ImportError:
    _BASES: tuple[type, ...] = (pl.Callback,)
else:
    _BASES = (pl.Callback, _StandaloneCallback)

Where = str | list[str] | None


class Callback(*_BASES):  # type: ignore[misc]
    """A callback for the trainers and command lines of ``lightning`` and of ``pytorch_lightning`` alike.

    The two are separate class trees, each of which refuses the other's callbacks; this class belongs to both where
    both are installed.
    """


def layer_label(index: int) -> str:
    """Name of the n-th chosen layer in logged metrics."""
    return f"layer_{index:02d}"


def current_step(trainer: pl.Trainer) -> int:
    """Steps taken so far, as Lightning's own metrics count them: one a batch that stepped, for any optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_now(pl_module: pl.LightningModule, values: Mapping[str, Tensor]) -> None:
    """Log scalars at the current training step, whether or not ``log_every_n_steps`` falls on it.

    ``self.log`` alone would write them with the next step that the trainer logs, under that step's number.
    """
    for name, value in values.items():
        pl_module.log(name, value, on_step=True, on_epoch=False, logger=False)
    if not values:
        return
    scalars = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))  # one transfer
    for logger in pl_module.trainer.loggers:
        logger.log_metrics(scalars, step=current_step(pl_module.trainer))


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 has sharded, gathered (every process must call this), differentiably; others as they are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_every_n_steps(every_n_steps: int) -> int:
    """The same number.

    Raises:
        ValueError: if it is not a positive integer.
    """
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
        raise ValueError(f"every_n_steps must be an integer of at least 1, got {every_n_steps!r}")
    return every_n_steps


def overrides(pl_module: pl.LightningModule, method: str) -> bool:
    """Whether the module's class has a method of its own in place of Lightning's, of either package."""
    core = ("lightning.pytorch.core.", "pytorch_lightning.core.")
    return not getattr(type(pl_module), method).__module__.startswith(core)


Action = Callable[[pl.LightningModule], None]


def _configure_then_run(
    pl_module: pl.LightningModule, previous: Callable[[], None] | None, actions: dict[int, Action]
) -> None:
    if previous is None:
        type(pl_module).configure_model(pl_module)
    else:
        previous()
    for action in list(actions.values()):
        action(pl_module)


def _pending_actions(pl_module: pl.LightningModule) -> dict[int, Action] | None:
    hook = vars(pl_module).get("configure_model")
    if isinstance(hook, partial) and hook.func is _configure_then_run:
        return hook.args[2]
    return None


def after_configure_model(pl_module: pl.LightningModule, owner: Callback, action: Action) -> None:
    """Have ``action(pl_module)`` run at the end of ``configure_model``, once for each owner.

    By then the network exists, whether it was built in ``__init__``, ``setup`` or ``configure_model``; no weights
    were restored, nothing was sharded and no optimizer was built. Call it in :meth:`Callback.setup`, which Lightning
    runs before the module's own ``setup`` and ``configure_model``.
    """
    actions = _pending_actions(pl_module)
    if actions is None:
        actions = {}
        previous = vars(pl_module).get("configure_model")
        # A partial, unlike a closure, can be copied and pickled with the module.
        pl_module.configure_model = partial(_configure_then_run, pl_module, previous, actions)  # type: ignore[method-assign]
    actions[id(owner)] = action


def forget_actions(pl_module: pl.LightningModule, owner: Callback) -> None:
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
