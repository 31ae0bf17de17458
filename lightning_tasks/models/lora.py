"""Low-rank adapters around a model's linear layers, by peft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attention_modules import AttentionMechanism
from attention_modules.extras import needed_for
from attention_modules.mechanisms.shared.options import check_choice, check_flag, check_integer, check_number
from lightning_tasks.errors import reason
from lightning_tasks.training.hparams import plain_data

OPTIONS: dict[str, Callable[[Any], Any]] = {
    "r": lambda value: check_integer("r", value, 1),
    "lora_alpha": lambda value: check_number("lora_alpha", value, above=0.0),
    "lora_dropout": lambda value: check_number("lora_dropout", value, 0.0, 1.0),
    "target_modules": lambda value: _names("target_modules", value),
    "exclude_modules": lambda value: _names("exclude_modules", value),
    "layers_to_transform": lambda value: [check_integer("layers_to_transform", one, 0) for one in _listed(value)],
    "bias": lambda value: check_choice("bias", value, ("none", "all", "lora_only")),
    "use_rslora": lambda value: check_flag("use_rslora", value),
    "use_dora": lambda value: check_flag("use_dora", value),
}


def check_lora(options: Any) -> dict[str, Any] | None:
    """The options as plain data.

    Raises:
        ValueError: if one is none of those of ``peft.LoraConfig`` that are taken here, or out of its limits.
    """
    if options is None:
        return None
    if not isinstance(options, Mapping) or set(options) - {*OPTIONS}:
        raise ValueError(f"lora must be a mapping with any of {', '.join(OPTIONS)}, got {options!r}")
    return {name: OPTIONS[name](value) for name, value in plain_data(options, "lora").items()}


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _names(option: str, value: Any) -> list[str]:
    """Names of layers, or ends of them; a regular expression is not taken.

    Raises:
        ValueError: if it is no list of strings.
    """
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"lora: {option} must be a list of names such as ['q_proj', 'v_proj'], got {value!r}")
    return [*value]


def with_lora(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """A peft model that trains adapters, and the Parameters of mechanisms; all else is frozen.

    Args:
        model: whose attention is swapped already.
        options: of ``peft.LoraConfig``; all linear layers but the head have adapters where ``target_modules`` is left
            out.

    Raises:
        ModuleNotFoundError: if peft is not installed.
        ValueError: if a name is that of no layer, or peft refuses the options for this model.
    """
    with needed_for("lora", "lora"):
        from peft import LoraConfig, get_peft_model

    layers = [f".{name}" for name, _ in model.named_modules()]
    for option in ("target_modules", "exclude_modules"):
        for one in options.get(option, ()):
            if not any(layer.endswith(f".{one}") for layer in layers):
                raise ValueError(f"lora: {option} names {one!r}, and {type(model).__name__} has no such layer")
    learned = any(isinstance(each, AttentionMechanism) and [*each.parameters()] for each in model.modules())
    chosen = {"target_modules": "all-linear", "modules_to_save": ["mechanism"] if learned else None, **options}
    try:
        return get_peft_model(model, LoraConfig(**chosen))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lora={dict(options)!r}: peft refuses it for {type(model).__name__} ({reason(error)})"
        ) from error
