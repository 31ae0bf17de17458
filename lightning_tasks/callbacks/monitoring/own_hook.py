"""Hooks that a copy of a module does not take along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def _nothing(*_: Any) -> None:
    """What a copied hook does."""


_paused = 0


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, these hooks do nothing: a monitor calls the model for itself."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def _copied() -> Callable[..., None]:
    return _nothing


class OwnHook:
    """A forward hook, before or after, that acts for one module alone: in a copy or a pickle of it it does nothing.

    A function would be shared with the copy (a teacher that is made in a training step), which would be watched too.
    """

    only_watches = True

    def __init__(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._module, self._hook = ref(module), hook

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """What the hook gives, for its own module."""
        if self._module() is not module or _paused:
            return None
        # A mode such as selective activation checkpointing keeps what is computed, in order: this is none of it.
        with nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
            return self._hook(module, *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, ()
