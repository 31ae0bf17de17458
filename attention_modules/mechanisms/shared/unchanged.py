"""Calls of a module that leave it, and what it draws from, as they were."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from attention_modules.function import FunctionAttention
from attention_modules.mechanisms.shared.kept import (
    Place,
    default_states,
    is_elsewhere,
    own_copies,
    places,
    put_back,
)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_State = tuple[Callable[..., Any], Any]  # what sets it, and what it is
_MOST = 1_000  # entries of one attribute in which generators are looked for


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, calls of a module have copies of what it keeps; afterwards it is as before.

    They have copies of its buffers and, of a class that is nobody's but the user's, of all that it or its function
    keeps (:func:`.own_copies`). Other attributes are as before at the end. Where calls have made Parameters or modules,
    as those of lazy ones do, attributes that they have set stay, too: they say that it is made.
    """
    parts, made = list(module.modules()), _made(module)
    held = [(each, dict(each)) for part in parts for each in (part._buffers, vars(part))]
    copied: list[Place] = []
    with ExitStack() as back:
        for part in parts:
            copied.append((part._buffers.update, dict(part._buffers)))
            if is_elsewhere(type(part).__module__):
                own = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
                copied.append((vars(part).update, own))
            for put, kept in places(part.function) if isinstance(part, FunctionAttention) else ():
                copied.append((put, kept))
                back.callback(put, kept)
        copied = [(put, kept) for put, kept in copied if kept]
        for (put, _), own in zip(copied, own_copies([kept for _, kept in copied]), strict=True):
            put(own)
        begun = [dict(now) for now, _ in held]
        try:
            yield
        finally:
            is_new = not _made(module) <= made
            for (now, before), at_first in zip(held, begun, strict=True):
                set_since = {name: value for name, value in now.items() if value is not at_first.get(name)}
                gone = at_first.keys() - now.keys()
                kept = {name: value for name, value in before.items() if name not in gone} | set_since
                put_back(now, kept if is_new else before)


def _made(module: nn.Module) -> set[tuple[int, str, Any]]:
    """What parts, by their identities, have of Parameters, each with its shape, and of modules, and their classes."""
    found: set[tuple[int, str, Any]] = set()
    for part in module.modules():
        found.add((id(part), "", type(part)))  # that of a lazy one changes
        found |= {(id(part), name, None) for name, value in part._modules.items() if value is not None}
        there = ((name, value) for name, value in part._parameters.items() if value is not None and not is_lazy(value))
        found |= {(id(part), name, tuple(value.shape)) for name, value in there}
    return found


@contextmanager
def unobserved(module: nn.Module) -> Iterator[None]:
    """As :func:`unchanged`, and no hook of anybody's sees a call, but those of PyTorch that make weights."""
    with unchanged(module), ExitStack() as back:
        for part in module.modules():
            for name in _HOOKS:
                before = getattr(part, name)
                if before:
                    made = [(at, hook) for at, hook in before.items() if type(hook).__module__.startswith("torch.nn.")]
                    setattr(part, name, OrderedDict(made))
                    back.callback(setattr, part, name, before)
        yield


@contextmanager
def repeatable(*devices: torch.device) -> Iterator[Callable[[], None]]:
    """Gives what sets random states to those of the start, as they are at the end again."""
    again = partial(_set, _of_process(devices))
    try:
        yield again
    finally:
        again()


class Draw:
    """What a model draws from at a moment: the random states of this process, and generators that its modules hold.

    Args:
        model: the model, at the moment.
    """

    def __init__(self, model: nn.Module) -> None:
        self._devices = {tensor.device for tensor in model.parameters()}
        self._process = _of_process(self._devices)
        self._held = {place: state for place, (_, state) in _held_by(model).items()}

    @contextmanager
    def again(self, model: nn.Module) -> Iterator[None]:
        """Inside, a call of the model, or of a copy, begins with the same; afterwards random states are as before."""
        held = _held_by(model)
        before = [*_of_process(self._devices), *held.values()]
        try:
            _set(self._process)
            _set([(put, self._held[place]) for place, (put, _) in held.items() if place in self._held])
            yield
        finally:
            _set(before)


def _set(states: Iterable[_State]) -> None:
    for put, state in states:
        put(state)


def _of_process(devices: Iterable[torch.device]) -> list[_State]:
    """The random states of this process, where modules on these devices draw."""
    states: list[_State] = [(torch.set_rng_state, torch.get_rng_state()), *default_states()]
    for device in devices:
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


def _held_by(model: nn.Module) -> dict[tuple[str, str, int], _State]:
    """By module, attribute and place in it, the states of generators that attributes of modules are or hold."""
    found: dict[tuple[str, str, int], _State] = {}
    for module, part in model.named_modules():
        own = {name: held for name, held in vars(part).items() if name not in _OF_EVERY_MODULE}
        for name, held in own.items():
            for place, value in enumerate(_inside(held)):
                if (state := _state_of(value)) is not None:
                    found[module, name, place] = state
    return found


def _inside(value: Any) -> Iterator[Any]:
    """What it is, and what it holds: of a container its entries, of an object of the user's class its attributes."""
    yield value
    if type(value) is dict:
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        value = vars(value).values() if hasattr(value, "__dict__") and is_elsewhere(type(value).__module__) else ()
    yield from islice(value, _MOST)


def _state_of(value: Any) -> _State | None:
    """What sets the state of a generator, and its state; None of what is none, or has none."""
    of_numpy = type(value).__module__.startswith("numpy.random.")
    if isinstance(value, torch.Generator) or (of_numpy and hasattr(value, "set_state")):
        return value.set_state, value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.setstate, value.getstate()
    if of_numpy and hasattr(bits := getattr(value, "bit_generator", value), "state"):
        return partial(setattr, bits, "state"), bits.state
    return None
