"""A task's choice of attention: as plain data, and in the layers of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn import functional as F

from attention_modules.function import is_attention_function
from attention_modules.hosts import attention_layers
from attention_modules.mechanism import AttentionMechanism, Mechanism, check_options, mechanism_class
from attention_modules.sharing import READS
from attention_modules.swap import swap_attention
from lightning_tasks.training.hparams import Spec, import_object
from lightning_tasks.training.kept_layers import Layers, chosen_names
from lightning_tasks.training.kinds import check_kind, checked_spec


def attention_spec(value: Any, options: Mapping[str, Any] | None = None) -> str | Spec:
    """A registered short name as it is; a class, function or dotted path as ``{class_path, init_args}``.

    A function is one of ``(q, k, v, ...)``, or builds the mechanism from an ``AttentionSpec``.

    Options beside "softmax" are warned of, as they are not used.

    Raises:
        ValueError: if a short name is unknown (the nearest are named), or a path names nothing.
        TypeError: if it cannot be stored in a checkpoint, what a short name stands for does not take the options, or a
            path names something else than a mechanism or a function of the user's that is or makes one.
    """
    value = plain_name(value)
    if isinstance(value, str) and "." not in value:
        cls = mechanism_class(value)
        if options and value == "softmax":  # no error: a task whose checkpoint has such options could not be built
            rank_zero_warn(
                f"mechanism='softmax' takes no options, and options={dict(options)!r} is not used: leave it "
                "out by --model.options null (in YAML options: null), or name the mechanism that "
                "it is for by --model.mechanism"
            )
        elif options:
            _check_options(cls, options)
        return value
    if isinstance(value, Mapping) and "." not in str(value.get("class_path", ".")):
        value = {**value, "class_path": mechanism_class(value["class_path"])}
    spec = checked_spec(value, place="mechanism")
    function = import_object(spec["class_path"])
    if is_attention_function(function):
        _check_options(mechanism_class(function), {**spec["init_args"], **(options or {})})
    return spec


def plain_name(mechanism: Any) -> Any:
    """ "softmax" for PyTorch's own function or its path, which is a builtin of a private module; all else as it is."""
    path = "torch.nn.functional.scaled_dot_product_attention"
    return "softmax" if mechanism is F.scaled_dot_product_attention or mechanism == path else mechanism


def named(mechanism: Any) -> str:
    """What ``attnswap drift`` calls a mechanism that a task is given: its short name, or its import path."""
    spec = attention_spec(mechanism)
    return spec if isinstance(spec, str) else str(spec["class_path"])


def mechanism_from(spec: str | Spec, options: Mapping[str, Any] | None) -> tuple[Mechanism, dict[str, Any]]:
    """What ``mechanism=`` and its options are for a model or :func:`~attention_modules.swap_attention`."""
    if isinstance(spec, str):
        return spec, {} if spec == "softmax" else dict(options or {})
    target, arguments = import_object(spec["class_path"]), {**spec["init_args"], **(options or {})}
    check_kind(target, "mechanism", spec["class_path"])
    if isinstance(target, type) or is_attention_function(target):
        return target, arguments
    return functools.partial(target, **arguments), {}


def swap_layers(
    model: nn.Module,
    attention: Mechanism,
    options: Mapping[str, Any],
    layers: Layers | Sequence[int],
    other: Mechanism = "softmax",
    other_options: Mapping[str, Any] | None = None,
) -> None:
    """Put ``attention`` into the chosen layers of a model and ``other`` into the rest, each layer once.

    A layer that is to have plain softmax attention stays as its library made it, unless others read its values.

    Raises:
        AttentionSwapError: as :func:`attention_modules.swap_attention`.
    """
    if attention == "softmax" and (layers is None or other == "softmax"):
        return
    chosen = chosen_names(model, layers)
    swap_rest(model, chosen, other, other_options, plain=_reads_others(attention))
    if attention != "softmax":
        swap_attention(model, attention, where=chosen, **options)


def swap_rest(
    model: nn.Module,
    chosen: Sequence[str],
    other: Mechanism,
    options: Mapping[str, Any] | None = None,
    *,
    plain: bool = False,
) -> None:
    """Put a mechanism into the layers that were not chosen; softmax only where ``plain`` ones are to be swapped too."""
    rest = [layer.name for layer in attention_layers(model) if layer.name not in chosen]
    if rest and (other != "softmax" or plain):
        swap_attention(model, other, where=rest, **(options or {}))


def _reads_others(attention: Mechanism) -> bool:
    """Whether a mechanism reads the values of other layers; not known of a callable that builds it."""
    if not isinstance(attention, (str, type)) and not is_attention_function(attention):
        return False
    return any(need in READS for need in mechanism_class(attention).needs)


def _check_options(mechanism: type[AttentionMechanism], options: Mapping[str, Any]) -> None:
    """Refuse options of another mechanism, such as a recipe brings them, with the way to leave them out."""
    try:
        check_options(mechanism, options)
    except TypeError as error:
        raise TypeError(
            f"{str(error).rstrip('.')}. Where options={options!r} is a recipe's, for another "
            "mechanism, --model.options null leaves it out (in YAML options: null)"
        ) from error
