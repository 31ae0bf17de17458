"""Copies of layers that a model holds where nobody looks for its modules: in an average's object, a list, a closure."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from attention_modules.hosts.base import acting_mechanism, plain_type
from attention_modules.hosts.model.twins import Plan
from attention_modules.hosts.networks import are_copies
from attention_modules.hosts.sdpa.rehearsed import held_by, walk

# Whose objects are not opened, but for modules: they hold the model, a whole program, or plain layers on purpose.
_CLOSED = frozenset({"attention_modules", "lightning", "lightning_tasks", "pytorch_lightning"})
_SHUT: tuple[Any, ...] = (type, ModuleType, Tensor)
_MOST, _MOST_OBJECTS = 1_000, 100_000  # entries of one container, and objects of one attribute, that are looked at


def warn_of_copies(model: nn.Module, plan: Plan, stacklevel: int) -> None:
    """Name an equal copy of a layer of the swap, which the swap cannot see, as no module has it among its children."""
    seen: dict[int, Any] = {id(part): part for part in model.modules()}
    for place, part in model.named_modules():
        for attribute, value in vars(part).items():
            if attribute.startswith("_hparams"):  # copies that Lightning keeps of what the module was built with
                continue
            for other in islice(walk(value, _held, seen), _MOST_OBJECTS):
                if issubclass(type(other), nn.Module) and (name := _original(other, plan)) is not None:
                    holder = ".".join(filter(None, (place, attribute)))
                    warnings.warn(
                        f"what {holder!r} holds ({type(value).__name__}) has a copy of {name!r}, which this swap does "
                        "not take, as it is no module of the model: an average would keep the old attention; swap "
                        "before the copy is made (in __init__), or the copy as well, unless it stays as it is",
                        stacklevel=stacklevel + 1,
                    )
                    return


def _original(other: nn.Module, plan: Plan) -> str | None:
    """The name of a layer of the swap that a module is an equal copy of, but for the mechanism."""
    for layer, built in plan:
        if plain_type(other) is plain_type(layer.module) and are_copies(layer.module, other):
            has = acting_mechanism(getattr(other, "mechanism", None))
            return None if type(has) is type(built) else layer.name
    return None


def _held(value: Any) -> Iterable[Any]:
    """What an object holds; nothing where it raises, as a stranger's may that is asked."""
    with suppress(Exception):
        return [*islice(_inside(value), _MOST)]
    return ()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, _SHUT):
        return ()
    if isinstance(value, CellType):
        with suppress(ValueError):  # an empty one
            return (value.cell_contents,)
    if isinstance(value, FunctionType):
        return (*held_by(value), *(value.__closure__ or ()))
    if held := held_by(value):
        return held
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in _CLOSED:
        return attributes.values()
    return attributes.get("callbacks", ())  # of a trainer
