"""Layers that other code does not call: it keeps their bound forward, or reads their weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from types import MethodType

from torch import nn

from attention_modules.hosts.sdpa.rehearsed import held_by, walk


def held_forwards(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Sentences on the layers whose bound ``forward`` another part of the model keeps, in a list of steps, say.

    It would call the plain forward once the layer is swapped.

    Args:
        model: all of it.
        layers: those to be swapped, by name.
    """
    names = {id(layer): name for name, layer in layers.items()}
    return [
        f"{names[id(method.__self__)]!r}, whose bound forward {place or type(part).__name__!r} keeps in {attribute!r}"
        for place, part in model.named_modules()
        for attribute, value in vars(part).items()
        for method in walk(value, held_by)
        if isinstance(method, MethodType)
        and id(method.__self__) in names
        and method.__self__ is not part
        and _name(method) == "forward"
    ]


def _name(method: MethodType) -> str | None:
    return getattr(method.__func__, "__name__", None)


def warn_of_uncalled(layers: Mapping[str, nn.Module], called: Collection[nn.Module], stacklevel: int) -> None:
    """Name the layers that an example does not call, where it was run."""
    if called and (others := [name for name, module in layers.items() if module not in called]):
        warnings.warn(
            f"the example calls {len(layers) - len(others)} of the {len(layers)} layers that are swapped, and not "
            f"{others[0]!r}{f' and {len(others) - 1} more' if len(others) > 1 else ''}: a mechanism acts where the "
            "layer itself is called, and not where other code reads its weights",
            stacklevel=stacklevel + 1,
        )
