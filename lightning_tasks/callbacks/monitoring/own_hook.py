"""Hooks that a copy of a module does not take along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import nn


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
        return self._hook(module, *args) if self._module() is module and not _paused else None

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, ()
