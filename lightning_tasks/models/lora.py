"""Low-rank adapters around a model's linear layers, by peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from attention_modules import AttentionMechanism
from attention_modules.extras import needed_for
from lightning_tasks.errors import reason
from lightning_tasks.training.hparams import plain_data

OPTIONS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "bias",
    "use_rslora",
    "use_dora",
)


def check_lora(options: Any) -> dict[str, Any] | None:
    """The options as plain data.

    Raises:
        ValueError: if one is none of those of ``peft.LoraConfig`` that are taken here.
    """
    if options is None:
        return None
    if not isinstance(options, Mapping) or set(options) - {*OPTIONS}:
        raise ValueError(f"lora must be a mapping with any of {', '.join(OPTIONS)}, got {options!r}")
    return plain_data(options, "lora")


def with_lora(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """A peft model that trains adapters, and the Parameters of mechanisms; all else is frozen.

    Args:
        model: whose attention is swapped already.
        options: of ``peft.LoraConfig``; all linear layers but the head have adapters where ``target_modules`` is left
            out.

    Raises:
        ModuleNotFoundError: if peft is not installed.
        ValueError: if peft refuses the options for this model.
    """
    with needed_for("lora", "lora"):
        from peft import LoraConfig, get_peft_model

    learned = any(isinstance(each, AttentionMechanism) and [*each.parameters()] for each in model.modules())
    chosen = {"target_modules": "all-linear", "modules_to_save": ["mechanism"] if learned else None, **options}
    try:
        return get_peft_model(model, LoraConfig(**chosen))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lora={dict(options)!r}: peft refuses it for {type(model).__name__} ({reason(error)})"
        ) from error
