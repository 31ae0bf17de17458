"""A resumed fit whose optimizer or schedule is another than the checkpoint's is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_tasks.files.weights import WEIGHTS_ONLY
from lightning_tasks.training.hparams import import_object

_SETTINGS = ("optimizer", "scheduler", "scheduler_interval", "param_groups", "layer_decay")
RESUME_CURE = f"Resume with the settings of the checkpoint, or {WEIGHTS_ONLY}"


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
            f"the checkpoint's optimizer cannot be resumed with other settings: {'; '.join(changed)}. {RESUME_CURE}"
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
