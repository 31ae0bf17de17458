"""A model for a trial: it runs without hooks and in evaluation mode, and is as before afterwards."""

from __future__ import annotations

import copy
import functools
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn

from attention_modules.sharing import SharedValues

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_SMALL = 1 << 20  # numbers of a tensor: a state of running means, and no table


@contextmanager
def rehearsed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, all modules that a model reaches have no hooks, are in evaluation mode, and change nothing that stays.

    Hooks stay that make weights, as those of PyTorch do, or hand values from layer to layer. It is the model itself
    that runs, as its parts may refer to each other in any way: by a list, a method, a closure. Its Parameters stay the
    same; buffers, tensors, lists and dicts are copies meanwhile, of modules that it does not register the small ones.
    Of objects of other kinds none is made.

    Yields:
        the modules.
    """
    own: dict[int, Any] = {}
    with torch.random.fork_rng(devices=_devices(model)), torch.compiler.set_stance("force_eager"), ExitStack() as back:
        for draws in (random, getattr(sys.modules.get("numpy"), "random", None)):
            if draws is not None:
                get, put = ("getstate", "setstate") if draws is random else ("get_state", "set_state")
                back.callback(getattr(draws, put), getattr(draws, get)())
        parts, inside = [*_reached(model)], {id(part) for part in model.modules()}
        for part in parts:
            back.callback(_set_back, part, type(part), dict(vars(part)))
            most = math.inf if id(part) in inside else _SMALL
            vars(part).update({name: _own(value, own, most) for name, value in vars(part).items()})
            vars(part).update({name: _that_compute(vars(part)[name]) for name in _HOOKS})
            vars(part)["training"] = False
        yield parts


def _devices(model: nn.Module) -> list[int]:
    return sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})


def _set_back(part: nn.Module, kind: type, attributes: dict[str, Any]) -> None:
    if type(part) is not kind:  # one that becomes another class in its first forward
        part.__class__ = kind  # type: ignore[assignment]
    vars(part).clear()
    vars(part).update(attributes)


def _that_compute(hooks: dict[int, Any]) -> dict[int, Any]:
    made = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.")}
    shared = {key: hook for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), SharedValues)}
    return OrderedDict(made | shared)


def _reached(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, and those that attributes of theirs hold unregistered."""
    seen, waiting = dict[int, Any](), list[Any]([model])
    while waiting:
        value = waiting.pop()
        if id(value) in seen or type(value) in ProxyTypes:  # a proxy is of a module that is held elsewhere
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield value
            waiting.extend(vars(value).values())
        else:
            waiting.extend(held_by(value))


def held_by(value: Any) -> Iterable[Any]:
    """What a container holds, a bound or partial function is of, or a compiled one was; of other objects nothing."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, deque)):
        return value
    if isinstance(value, MethodType):  # a forward that accelerate left, or that of another part
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    compiled = getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None
    return () if compiled is None else (compiled,)


def _own(value: Any, known: dict[int, Any], most: float) -> Any:
    """The value with containers and tensors of its own; modules, Parameters and other objects stay the same.

    So do tensors of more than so many numbers.
    """
    if id(value) in known:
        return known[id(value)]
    own = value
    if isinstance(value, (dict, list, set, deque)):
        with suppress(Exception):  # of a frozen one, which takes no values
            own = copy.copy(value)
        known[id(value)] = own
        if own is not value and isinstance(own, (dict, list)):
            for key, part in [*(own.items() if isinstance(own, dict) else enumerate(own))]:
                made = _own(part, known, most)
                with suppress(Exception):
                    own[key] = made  # type: ignore[index]
    elif type(value) is tuple:
        own = known[id(value)] = tuple(_own(part, known, most) for part in value)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() <= most:
        own = known[id(value)] = value.clone()
    return own
