"""What code keeps outside of Parameters and buffers, so that a call of ours changes none of it."""

from __future__ import annotations

import copy
import dis
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# Whose objects are left as they are: they keep nothing of a call, or all that a program holds.
_LIBRARIES = {
    "accelerate",
    "attention_modules",
    "builtins",
    "lightning",
    "lightning_tasks",
    "peft",
    "pytorch_lightning",
}
_LIBRARIES |= {"timm", "torch", "transformers", "weakref"}


def own_copy(value: Any, known: dict[int, Any], most: float) -> Any:
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
                made = own_copy(part, known, most)
                with suppress(Exception):
                    own[key] = made  # type: ignore[index]
    elif type(value) is tuple:
        own = known[id(value)] = tuple(own_copy(part, known, most) for part in value)
    elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.numel() <= most:
        own = known[id(value)] = value.clone()
    return own


def put_back_later(value: Any, back: ExitStack, seen: dict[int, Any], known: dict[int, Any], most: float) -> None:
    """Have generators of random numbers and attributes of plain objects be at the end as they are now.

    Args:
        value: a generator, an object, or what holds some.
        back: called at the end.
        seen: what was met before, by identity.
        known: as :func:`own_copy`, as is ``most``, of what objects hold.
        most: likewise.
    """
    if id(value) in seen or isinstance(value, (nn.Module, Tensor, type)):
        return
    seen[id(value)] = value
    if (state := random_state(value)) is not None:
        back.callback(*state)
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            put_back_later(each, back, seen, known, most)
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _LIBRARIES:
        before = dict(vars(value))
        back.callback(_set_attributes, value, before)
        for each in before.values():
            if (state := random_state(each)) is not None:
                back.callback(*state)
        vars(value).update({name: own_copy(each, known, most) for name, each in before.items()})


def _set_attributes(value: Any, before: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(before)


def random_state(value: Any) -> tuple[Any, ...] | None:
    """What to call with which arguments, so that a generator of random numbers is as it is now; None of others."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.set_state, value.get_state()
    return setattr, value.bit_generator, "state", value.bit_generator.state


def default_states() -> list[tuple[Any, ...]]:
    """What sets the generators of ``random`` and ``numpy.random`` to what they are now."""
    states: list[tuple[Any, ...]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def held_by_function(function: Any) -> Iterator[tuple[Any, set[str] | None]]:
    """What a function is bound to, was given before its call, or loads of its closure and module.

    Beside it the names of attributes that its code reads there; None where it takes the whole.
    """
    if isinstance(function, partial):
        yield from ((each, None) for each in (*function.args, *function.keywords.values()))
        yield from held_by_function(function.func)
    elif isinstance(function, MethodType):
        of: Any = function.__func__
        if isinstance(of, FunctionType):
            yield function.__self__, _read_of(of, of.__code__.co_varnames[:1])
        yield from held_by_function(of)
    elif isinstance(function, FunctionType):
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from ((each, None) for each in given)
        around = function.__globals__
        held = {name: around[name] for name in function.__code__.co_names if name in around}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                held[name] = cell.cell_contents
        yield from ((value, _read_of(function, (name,))) for name, value in held.items())


def _read_of(function: FunctionType, names: tuple[str, ...]) -> set[str] | None:
    code = [*dis.get_instructions(function)]
    found = set()
    for load, then in pairwise(code):
        if load.argval in names and load.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW"):
            if then.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            found.add(str(then.argval))
    return found
