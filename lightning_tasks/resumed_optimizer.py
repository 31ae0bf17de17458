"""The optimizer of a run that resumes: it goes on as the checkpoint has it, so nothing else may be asked for.

Lightning restores the optimizer and the schedule whole, their settings with them (`lr`, `weight_decay`, `T_max`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_tasks.callbacks.base import Callback
from lightning_tasks.resuming import WEIGHTS_ONLY
from lightning_tasks.training.hparams import import_object

_SETTINGS = ("optimizer", "scheduler", "scheduler_interval", "param_groups", "layer_decay")
_MOVED_BY_SCHEDULES = ("lr", "momentum", "betas")
_CURE = f"Resume with the settings of the checkpoint, or {WEIGHTS_ONLY}"


def refuse_other_settings(trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Refuse to resume a fit whose hyper-parameters ask for another optimizer or schedule than the checkpoint's.

    Raises:
        ValueError: the text names each setting, as it was and as it is now.
    """
    if trainer.state.fn != "fit" or not checkpoint.get("optimizer_states"):
        return
    stored, now = checkpoint.get("hyper_parameters", {}), pl_module.hparams
    changed = [
        line
        for name in _SETTINGS
        if name in stored and name in now
        for line in _differences(name, stored[name], now[name])
    ]
    if changed:
        raise ValueError(
            f"the checkpoint's optimizer cannot be resumed with other settings: {'; '.join(changed)}. {_CURE}"
        )


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """What differs between two values of a setting, as "name is A in the checkpoint and B now"."""
    if _is_spec(before) and _is_spec(now) and before["class_path"] == now["class_path"]:
        one, other = _arguments(before), _arguments(now)
        pairs = [(f"{name}.{key}", one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    else:
        pairs = [(name, before, now)]
    return [f"{what} is {_text(a)} in the checkpoint and {_text(b)} now" for what, a, b in pairs if a != b]


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a class, those that are left at their defaults too."""
    parameters = inspect.signature(import_object(spec["class_path"])).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    arguments = {**defaults, **(spec.get("init_args") or {})}
    arguments.pop("optimizer", None)  # a parser's blank among those of a schedule
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


def _text(value: Any) -> str:
    if not _is_spec(value):
        return repr(value)
    arguments = ", ".join(f"{name}={given!r}" for name, given in (value.get("init_args") or {}).items())
    return f"{value['class_path']}({arguments})"


class CheckResumedOptimizer(Callback):
    """Compares the optimizers of any module with those that a checkpoint is about to put in their place.

    Where they cannot be restored, the run is refused before it writes anything. Where hyper-parameters changed and the
    optimizer goes on with other numbers than they give it, that is a warning.

    Raises:
        ValueError: on start, if the optimizers are of another kind, or have other groups of parameters.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._stored: dict[str, Any] = {}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is to be compared once the optimizers are there."""
        self._states = checkpoint.get("optimizer_states") or []
        self._stored = dict(checkpoint.get("hyper_parameters") or {})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare; by now the optimizers are built and not yet restored."""
        states, self._states = self._states, []
        if not states or trainer.ckpt_path is None:
            return
        if len(states) != len(trainer.optimizers):
            raise ValueError(
                f"the checkpoint cannot be resumed: it holds the state of {len(states)} optimizers, and "
                f"{type(pl_module).__name__} has {len(trainer.optimizers)}. {_CURE}"
            )
        now = dict(pl_module.hparams)
        changed = any(name in self._stored and self._stored[name] != value for name, value in now.items())
        for optimizer, state in zip(trainer.optimizers, states, strict=True):
            _refuse_other_groups(optimizer, state)
            if changed:
                _warn_of_other_numbers(optimizer, state)


def _refuse_other_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    name, before = type(optimizer).__name__, state.get("param_groups", [])
    sizes = [len(group["params"]) for group in before], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoint cannot be resumed: its optimizer has groups of {sizes[0]} parameters, and {name} now has "
            f"groups of {sizes[1]}. {_CURE}"
        )
    for old, new in zip(before, optimizer.param_groups, strict=True):
        # What an optimizer is built with; schedules add keys of their own, and a later torch has further ones.
        missing = sorted(optimizer.defaults.keys() - old.keys())
        strange = sorted(old.keys() - new.keys() - {"initial_lr"})
        if missing and strange:
            raise ValueError(
                f"the checkpoint cannot be resumed: its optimizer (with {', '.join(strange)}) is none of the kind "
                f"{name} (with {', '.join(missing)}). {_CURE}"
            )


def _warn_of_other_numbers(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for old, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
        scheduled = "initial_lr" in new or "initial_lr" in old
        for key in sorted(old.keys() & new.keys() - {"params"} - set(_MOVED_BY_SCHEDULES if scheduled else ())):
            if isinstance(old[key], (int, float)) and old[key] != new[key]:
                rank_zero_warn(
                    f"--ckpt_path: {type(optimizer).__name__} goes on with {key} {old[key]!r} of the checkpoint, not "
                    f"with {new[key]!r} as configured. To start from the weights with it, give --init_from instead"
                )
