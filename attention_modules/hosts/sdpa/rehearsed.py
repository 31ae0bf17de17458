"""A model for a trial: it runs without hooks and in one mode, and is as before afterwards."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import nn

from attention_modules.mechanisms.shared.kept import own_copies, put_back
from attention_modules.mechanisms.shared.unchanged import repeatable
from attention_modules.sharing import SharedValues

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


@contextmanager
def rehearsed(model: nn.Module, training: bool = False) -> Iterator[list[nn.Module]]:
    """Inside, all modules that a model reaches have no hooks, are in one mode, and change nothing that stays.

    Hooks stay that compute: PyTorch's own make weights, those of transformers collect hidden states that the model
    needs, ours hand values from layer to layer. It is the model itself
    that runs, as its parts may refer to each other in any way: by a list, a method, a closure. Its Parameters stay the
    same; all else that they keep is copied meanwhile, but for what :func:`.own_copies` leaves as it is.

    Yields:
        the modules.
    """
    devices = {tensor.device for tensor in model.parameters()}
    with repeatable(*devices), torch.compiler.set_stance("force_eager"), ExitStack() as back:
        parts = [*_reached(model)]
        apart = {*_HOOKS, "_buffers"}
        kept = [{name: value for name, value in vars(part).items() if name not in apart} for part in parts]
        copies = own_copies([*kept, *(dict(part._buffers) for part in parts)])
        for part, own, buffers in zip(parts, copies, copies[len(parts) :], strict=False):
            back.callback(_set_back, part, type(part), dict(vars(part)))
            hooks = {name: _that_compute(vars(part)[name]) for name in _HOOKS}
            vars(part).update({**own, **hooks, "_buffers": buffers, "training": training})
        yield parts


def _set_back(part: nn.Module, kind: type, attributes: dict[str, Any]) -> None:
    if type(part) is not kind:  # one that becomes another class in its first forward
        part.__class__ = kind  # type: ignore[assignment]
    put_back(vars(part), attributes)


def _that_compute(hooks: dict[int, Any]) -> dict[int, Any]:
    def computes(hook: Any) -> bool:
        return (
            type(hook).__module__.startswith("torch.nn.")
            or getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
            or isinstance(getattr(hook, "__self__", None), SharedValues)
        )

    return OrderedDict((key, hook) for key, hook in hooks.items() if computes(hook))


def _reached(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model, and those that attributes of theirs hold unregistered."""
    found = walk(model, lambda value: vars(value).values() if isinstance(value, nn.Module) else held_by(value))
    return (value for value in found if isinstance(value, nn.Module))


def walk(start: Any, held: Callable[[Any], Iterable[Any]], seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """An object, and all that is held by what is reached, but for what was seen."""
    seen, waiting = {} if seen is None else seen, [start]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or type(value) in ProxyTypes:  # a proxy is of a module that is held elsewhere
            continue
        seen[id(value)] = value
        yield value
        waiting.extend(held(value))


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
