"""Forwards of layers that are held apart from them, and would stay plain."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn


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
        if not attribute.endswith("_hooks")
        for method in _methods(value)
        if id(method.__self__) in names and method.__self__ is not part and method.__func__.__name__ == "forward"
    ]


def _methods(value: Any) -> Iterator[MethodType]:
    seen, waiting = dict[int, Any](), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, MethodType):
            yield each
        elif id(each) not in seen and (held := [*_held(each)]):
            seen[id(each)] = each
            waiting += held


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    compiled = getattr(value, "_torchdynamo_orig_callable", None) if callable(value) else None
    return () if compiled is None or isinstance(value, nn.Module) else (compiled,)
