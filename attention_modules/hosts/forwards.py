"""Whose forward runs where a layer is called: that of its class, or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def has_other_forward(module: nn.Module) -> bool:
    """Whether the object has a forward beside its class's, as with hooks of accelerate and diffusers.

    Once these are removed, the class's own stands there.
    """
    found = module.__dict__.get("forward")
    own = getattr(found, "__self__", None) is module and getattr(found, "__func__", None) is type(module).forward
    return found is not None and not own


def has_replaced_forward(kind: type[nn.Module]) -> bool:
    """Whether somebody has put another forward into the class that defines it (``Attention.forward = mine``)."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    found = vars(owner)["forward"]
    names = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    return names != (owner.__module__, f"{owner.__qualname__}.forward")


def is_own_forward(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the module runs exactly this forward (a subclass that changes nothing there does)."""
    runs = getattr(type(module), "forward", None) is forward and not has_other_forward(module)
    return runs and not has_replaced_forward(type(module))
