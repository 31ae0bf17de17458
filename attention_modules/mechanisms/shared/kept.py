"""What code keeps outside of Parameters and buffers, so that a call of ours changes none of it."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

# Whose objects are left as they are: they keep nothing of a call, or all that a program holds.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"accelerate", "attention_modules", "lightning", "lightning_tasks"}
_LIBRARIES |= {"numpy", "peft", "pytorch_lightning", "timm", "torch", "transformers", "wandb"}
SMALL = 1 << 20  # numbers of a tensor: a state of running means, and no table
_FEW = 1_000  # entries of a container


def own_copy(value: Any, known: dict[int, Any], most: float) -> Any:
    """The value with containers and tensors of its own; modules, Parameters and other objects stay the same.

    So do tensors of more than so many numbers, and broadcast ones.
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


@contextmanager
def as_before(values: Iterable[Any]) -> Iterator[None]:
    """Inside, plain objects among some values, or in containers of them, have copies of small tensors and containers.

    At the end their attributes, and generators of random numbers, are as they were.
    """
    seen: dict[int, Any] = {}
    known: dict[int, Any] = {}
    waiting = list(values)
    with ExitStack() as back:
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, (nn.Module, Tensor, type)):
                continue
            seen[id(value)] = value
            if (state := random_state(value)) is not None:
                back.callback(*state)
            elif isinstance(value, (dict, list, tuple)) and len(value) <= _FEW:
                waiting.extend(value.values() if isinstance(value, dict) else value)
            elif is_elsewhere(type(value)) and hasattr(value, "__dict__"):
                before = dict(vars(value))
                back.callback(put_back, vars(value), before)
                waiting.extend(each for each in before.values() if random_state(each) is not None)
                vars(value).update({name: small_copy(each, known) for name, each in before.items()})
        yield


def is_elsewhere(kind: type) -> bool:
    """Whether a class is nobody's but the user's."""
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def small_copy(value: Any, known: dict[int, Any]) -> Any:
    """As :func:`own_copy`, of what is small; large tables and lists stay the same."""
    is_long = isinstance(value, (dict, list, set, deque, tuple)) and len(value) > _FEW
    return value if is_long else own_copy(value, known, SMALL)


def put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Have a dict hold what it held before; never nothing meanwhile, as another thread may read it."""
    for name in held.keys() - before.keys():
        del held[name]
    held.update(before)


def random_state(value: Any) -> tuple[Any, ...] | None:
    """What to call with which arguments, so that a generator of random numbers is as it is now; None of others."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else (value.setstate, value.getstate())
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
