"""A model for a trial: it runs without hooks and in evaluation mode, and is as before afterwards."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def rehearsed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, all modules that a model reaches have no hooks, are in evaluation mode, and change nothing that stays.

    It is the model itself that runs, as its parts may refer to each other in any way: by a list, a method, a closure.
    Its Parameters stay the same; buffers, tensors, lists and dicts are copies meanwhile. Of objects of other kinds
    none is made.

    Yields:
        the modules.
    """
    own: dict[int, Any] = {}
    with torch.random.fork_rng(devices=_devices(model)), torch.compiler.set_stance("force_eager"), ExitStack() as back:
        parts = [*_reached(model)]
        for part in parts:
            back.callback(_set_back, part, dict(vars(part)))
            vars(part).update({name: _own(value, own) for name, value in vars(part).items()})
            vars(part).update(
                {name: OrderedDict() for name in vars(part) if name.endswith("_hooks") or "_hooks_" in name}
            )
            vars(part)["training"] = False
        yield parts


def _devices(model: nn.Module) -> list[int]:
    return sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})


def _set_back(part: nn.Module, attributes: dict[str, Any]) -> None:
    vars(part).clear()
    vars(part).update(attributes)


def _reached(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, and those that attributes of theirs hold unregistered."""
    seen, waiting = dict[int, Any](), list[Any]([model])
    while waiting:
        value = waiting.pop()
        if id(value) not in seen and (held := _held(value)):
            seen[id(value)] = value
            waiting.extend(held)
            if isinstance(value, nn.Module):
                yield value


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    if isinstance(value, MethodType):  # a forward that accelerate left, or that of another part
        return (value.__self__,)
    return (*value.args, *value.keywords.values()) if isinstance(value, functools.partial) else ()


def _own(value: Any, known: dict[int, Any]) -> Any:
    """The value with containers and tensors of its own; modules, Parameters and other objects stay the same."""
    if id(value) in known:
        return known[id(value)]
    own = value
    if isinstance(value, (dict, list, set, deque)):
        own = known[id(value)] = copy.copy(value)
        if isinstance(own, (dict, list)):
            for key, part in own.items() if isinstance(own, dict) else enumerate(own):
                own[key] = _own(part, known)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        own = known[id(value)] = value.clone()
    return own
