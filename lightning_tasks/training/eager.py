"""Compiled models run without their compiled code, for as long as anybody here needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Stance:
    """``torch.compiler``'s stance, held by many at once, who leave in any order.

    The stance that the first of them found comes back with the last one's leave. Where each restored the one that it
    found itself, those who do not leave in the order of a stack would restore each other's.
    """

    def __init__(self) -> None:
        self._holders = 0
        self.held: Any = None

    def hold(self) -> None:
        self._holders += 1
        if self.held is None and "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it is slow
            self.held = torch.compiler.set_stance("force_eager")

    def leave(self) -> None:
        self._holders -= 1
        if self._holders == 0 and self.held is not None:
            held, self.held = self.held, None
            held.__exit__(None, None, None)


_STANCE = _Stance()


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled code eagerly: it sees no hook that came later, and has no second derivative."""
    _STANCE.hold()
    try:
        yield
    finally:
        _STANCE.leave()


def drops_out(model: torch.nn.Module) -> bool:
    """Whether a part of a model drops something at random while it trains."""
    parts = (part for part in model.modules() if "drop" in type(part).__name__.lower())
    return any(getattr(part, "p", 0) or getattr(part, "drop_prob", 0) for part in parts)


def draws_otherwise() -> bool:
    """Whether code is compiled that draws random numbers in another way than the same code eagerly."""
    if "torch._inductor.compile_fx" not in sys.modules or torch._inductor.config.fallback_random:
        return False
    return bool(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.compiler.disable(recursive=False)
def finish_eagerly() -> None:
    """Run what is left of a compiled call eagerly, too, where it began before somebody needed that.

    Called by a function that is ``torch.compiler.disable(recursive=False)``, too. Without, parts of the call would be
    compiled one by one, and torch fails where it is to tell why it compiles one of them again.
    """
    if _STANCE.held:
        torch._C._dynamo.eval_frame.set_eval_frame(None)  # type: ignore[attr-defined]
