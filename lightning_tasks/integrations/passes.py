"""What a forward pass, a backward pass and an optimizer's step show of themselves, in whosever loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_tasks.callbacks.base import held_parameters

Gradients = list[tuple[Tensor | None, int]]


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Of what an optimizer holds, each with how often it was written."""
    held = [each.grad for each in held_parameters([optimizer]).values()]
    return [(each, 0 if each is None else getattr(each, "_local_tensor", each)._version) for each in held]


def have_changed(before: Gradients, now: Gradients) -> bool:
    """Whether a backward pass between has written any."""
    return any(old is not new or written != then for (old, then), (new, written) in zip(before, now, strict=True))


def has_numbers(gradient: Tensor) -> bool:
    """Whether a gradient is anywhere not 0, which waits for its device."""
    return bool(((gradient.coalesce().values() if gradient.is_sparse else gradient) != 0).any())


def steps_by_scaler() -> bool:
    """Whether the caller was called by a `GradScaler`."""
    frame = next((each for each in _callers() if each.f_code is torch.amp.GradScaler.step.__code__), None)
    return frame is not None and frame.f_locals["self"].is_enabled()


def in_functional_call() -> bool:
    """Whether the caller was called by a `functional_call`, which puts tensors in the place of Parameters."""
    return any(each.f_globals.get("__name__") == "torch.nn.utils.stateless" for each in _callers())


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of what a model gave, also in dictionaries and dataclasses."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    held = [getattr(each, field.name) for each in leaves if is_dataclass(each) for field in fields(each)]
    return [each for each in (*leaves, *tree_leaves(held)) if isinstance(each, Tensor)]


def closure_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """What a step is given to compute the gradients itself; the first argument is the optimizer."""
    return keywords.get("closure", arguments[1] if len(arguments) > 1 else None)


def is_probe(nodes: Sequence[Any]) -> bool:
    """Whether the backward pass that runs is of torch.autograd.grad(): it leaves out the Parameters that it reaches.

    Those within reentrant checkpoints and of sharded modules it does not reach, and then it is none.
    """
    try:
        if any(map(torch._C._will_engine_execute_node, nodes)):  # type: ignore[attr-defined]
            return False
    except RuntimeError:  # it was asked for a Parameter's gradient
        return True
    sought, waiting = set(nodes), [torch._C._current_autograd_node()]  # type: ignore[attr-defined]
    seen = {*waiting}
    while waiting and sought:
        node = waiting.pop()
        if node in sought:
            return True
        inner = {each for each, _ in getattr(node, "next_functions", ()) if each is not None} - seen
        seen |= inner
        waiting += inner
    return False
