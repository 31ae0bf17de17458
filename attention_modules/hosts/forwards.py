"""Whose forward runs where a layer is called: that of its class, or another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def has_other_forward(module: nn.Module) -> bool:
    """Whether the object has a forward beside its class's, as with hooks of accelerate and diffusers.

    Once these are removed, the class's own stands there.
    """
    found = module.__dict__.get("forward")
    own = getattr(found, "__self__", None) is module and getattr(found, "__func__", None) is type(module).forward
    return found is not None and not own


def definer(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a class's forward comes from."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


def has_replaced_forward(kind: type[nn.Module]) -> bool:
    """Whether somebody has put another forward into the class that defines it (``Attention.forward = mine``)."""
    owner = definer(kind)
    found = vars(owner)["forward"]
    names = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    home = getattr(found, "__globals__", {}).get("__name__", "").partition(".")[0]  # functools.wraps copies the names
    library = home in ("torch", owner.__module__.partition(".")[0])
    return not library or names != (owner.__module__, f"{owner.__qualname__}.forward")


def is_own_forward(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the module runs exactly this forward (a subclass that changes nothing there does)."""
    runs = getattr(type(module), "forward", None) is forward and not has_other_forward(module)
    return runs and not has_replaced_forward(type(module))


def tokens_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor of a call, in the order of the forward's arguments, whatever that of the call's keywords."""
    kind: Any = getattr(module, "plain_class", type(module))
    try:
        order = [*inspect.signature(kind.forward).parameters]
    except (TypeError, ValueError):  # of a forward that is no function of Python's
        order = []
    names = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
    given = (*args, *(kwargs[name] for name in names))
    return next((value for value in given if isinstance(value, Tensor)), None)
