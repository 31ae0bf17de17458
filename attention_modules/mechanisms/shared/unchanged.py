"""Calls of a module that leave it, and what it draws from, as they were."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

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


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, calls of a module have copies of what it keeps; afterwards it is as before.

    They have copies of its buffers and, of a class that is nobody's but the user's, of all that it or its function
    keeps (:func:`.own_copies`). Other attributes are as before at the end. A part that makes Parameters or modules in a
    call, as lazy ones do in their first, stays as that call has left it.
    """
    copied: list[Place] = []
    with ExitStack() as back:
        for part in list(module.modules()):
            back.callback(_put_back, part, _made_of(part), dict(part._buffers), dict(vars(part)))
            copied.append((part._buffers.update, dict(part._buffers)))
            if is_elsewhere(type(part).__module__):
                own = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
                copied.append((vars(part).update, own))
            for put, held in places(part.function) if isinstance(part, FunctionAttention) else ():
                copied.append((put, held))
                back.callback(put, held)
        copied = [(put, held) for put, held in copied if held]
        for (put, _), own in zip(copied, own_copies([held for _, held in copied]), strict=True):
            put(own)
        yield


def _made_of(part: nn.Module) -> list[Any]:
    return [type(part), *map(id, (*part._parameters.values(), *part._modules.values()))]


def _put_back(part: nn.Module, made_of: list[Any], buffers: dict[str, Any], attributes: dict[str, Any]) -> None:
    if _made_of(part) == made_of:
        put_back(part._buffers, buffers)
        put_back(vars(part), attributes)


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
def repeatable(device: torch.device) -> Iterator[Callable[[], None]]:
    """Gives what sets random states to those of the start, as they are at the end again."""
    again = partial(_set, _of_process([device]))
    try:
        yield again
    finally:
        again()


class Draw:
    """What a model draws from at a moment: the random states of this process, and generators that are attributes.

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


def _held_by(model: nn.Module) -> dict[tuple[str, str], _State]:
    """By module and attribute, the state of each generator that is an attribute of a module."""
    found: dict[tuple[str, str], _State] = {}
    for module, part in model.named_modules():
        for name, value in vars(part).items():
            of_numpy = type(value).__module__.startswith("numpy.random.")
            if isinstance(value, torch.Generator) or (of_numpy and hasattr(value, "set_state")):
                found[module, name] = value.set_state, value.get_state()
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                found[module, name] = value.setstate, value.getstate()
            elif of_numpy and hasattr(bits := getattr(value, "bit_generator", value), "state"):
                found[module, name] = partial(setattr, bits, "state"), bits.state
    return found
