"""Copies of what code keeps outside of Parameters, so that a call of ours changes none of it."""

from __future__ import annotations

import copy
import dis
import io
import pickle
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn

# Whose objects and functions are left as they are: they keep nothing of a call, or all that a program holds.
_LIBRARIES = frozenset({"accelerate", "attention_modules", "lightning", "lightning_tasks", "peft"})
_LIBRARIES |= {"pytorch_lightning", "timm", "torch", "transformers", "wandb"}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset, deque})
Place = tuple[Callable[[dict[str, Any]], object], dict[str, Any]]  # what sets, and what is there
_SHARED = (type, nn.Module, nn.Parameter, FunctionType, BuiltinFunctionType, ModuleType, *ProxyTypes)


def own_copies(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of dicts and of all that they hold: what is one object, or memory, in the original is one in the copies.

    Modules, Parameters, functions, classes and objects of libraries stay the same, and what cannot be pickled; and so
    does an entry of a dict that cannot be made again of its pickle.
    """
    if not values:
        return []
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        with suppress(Exception):
            return list(_copy_of_all(values))
        apart = []
        for value in (value for each in values for value in each.values()):
            try:
                _copy_of_all(value)
            except Exception:  # of code that pickling calls, or a list within a list within a list ...
                apart.append(value)
        return list(_copy_of_all(values, apart))


def _copy_of_all(value: Any, apart: Sequence[Any] = ()) -> Any:
    written = io.BytesIO()
    (writer := _Writer(written, apart)).dump(value)
    return _Reader(written, writer).load()


def copy_of(value: Any) -> Any:
    """A copy of a tensor, whose changes in place are counted; of a broadcast one, which takes none, the same."""
    if not isinstance(value, Tensor) or _is_broadcast(value):
        return value
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        return value.clone()


def _is_broadcast(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


class _Same:
    """An object that stays the same, as it cannot be pickled."""

    def __init__(self, of: Any) -> None:
        self.of = of


def _itself(value: Any) -> Any:
    return value


class _Writer(pickle.Pickler):
    """Notes in ``held`` what it does not write: tensors and generators, to be copied, and what stays the same."""

    def __init__(self, file: io.BytesIO, apart: Sequence[Any]) -> None:
        super().__init__(file, protocol=5)
        self.held: list[Any] = []  # which are held, so that none of another's identity follows
        self._places: dict[int, int] = {}
        self._apart = {id(value) for value in apart}

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind is _Same:
            value = value.of
        elif not (self._apart and id(value) in self._apart) and (kind in _PLAIN or _is_written(kind)):
            return None
        place = self._places.setdefault(id(value), len(self.held))
        if place == len(self.held):
            self.held.append(value)
        return place

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType, (value.__func__, value.__self__)
        with suppress(Exception):
            if isinstance(made := value.__reduce_ex__(5), tuple):
                return made
        return _itself, (_Same(value),)

    def copies(self) -> list[Any]:
        """What stands in the places of what was not written."""
        known: dict[int, Any] = {}
        memory = [_memory(value) for value in self.held]
        shared = {at for at, times in Counter(memory).items() if at and times > 1}
        return [_copied(value, known if at in shared else None) for value, at in zip(self.held, memory, strict=True)]


class _Reader(pickle.Unpickler):
    def __init__(self, written: io.BytesIO, writer: _Writer) -> None:
        written.seek(0)
        super().__init__(written)
        self._copies = writer.copies()

    def persistent_load(self, place: int) -> Any:
        return self._copies[place]


def _is_written(kind: type) -> bool:
    """Whether a copy of a class's objects is made of their pickle."""
    if kind is object or issubclass(kind, (*_SHARED, Tensor, torch.Generator)) or hasattr(kind, "__del__"):
        return False
    return issubclass(kind, (dict, list, tuple, set, frozenset, deque)) or is_elsewhere(kind.__module__)


def is_elsewhere(module: str) -> bool:
    """Whether a module is of no library that handles attention or models."""
    return module.partition(".")[0] not in _LIBRARIES


def _memory(value: Any) -> int:
    """Where a tensor that is to be copied has its numbers; 0 of what is to be copied alone."""
    if not issubclass(type(value), Tensor) or issubclass(type(value), nn.Parameter) or value.requires_grad:
        return 0
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or of a transform
        return 0


def _copied(value: Any, known: dict[int, Any] | None) -> Any:
    if issubclass(type(value), torch.Generator):
        return value.clone_state()
    if not issubclass(type(value), Tensor) or issubclass(type(value), nn.Parameter):
        return value
    if known is not None:
        with suppress(Exception):
            return copy.deepcopy(value, known)  # with what views of the same memory share
    return copy_of(value)


def put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Have a dict hold what it held before; never nothing meanwhile, as another thread may read it."""
    for name in held.keys() - before.keys():
        del held[name]
    held.update(before)


def places(function: Any, known: set[int] | None = None) -> Iterator[Place]:
    """Where a function keeps something from call to call: what it is bound to, is given, or reads outside of itself."""
    known = set() if known is None else known
    if id(function) in known:
        return
    known.add(id(function))
    if isinstance(function, partial):
        yield (lambda held: _set_given(function, **held)), {"args": function.args, "keywords": function.keywords}
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from places(value, known)
    elif isinstance(function, MethodType):
        if hasattr(function.__self__, "__dict__") and _is_written(type(function.__self__)):
            yield partial(put_back, vars(function.__self__)), dict(vars(function.__self__))
        yield from places(function.__func__, known)
    elif isinstance(function, FunctionType):
        cells = [*_filled(function)]
        if is_elsewhere(function.__globals__.get("__name__", "")):
            read = _globals(function.__code__) & function.__globals__.keys()
            yield function.__globals__.update, {name: function.__globals__[name] for name in read}
            own = [(function, "__defaults__"), (function, "__kwdefaults__")]
            for owner, name in [*own, *((cell, "cell_contents") for cell in cells)]:
                yield partial(_set, owner), {name: getattr(owner, name)}
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for value in (*(cell.cell_contents for cell in cells), *given):  # of one that another is put around
            yield from places(value, known)


def _filled(function: FunctionType) -> Iterator[CellType]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            cell.cell_contents  # noqa: B018 - an error where it is not filled yet
            yield cell


def _set(owner: Any, held: dict[str, Any]) -> None:
    for name, value in held.items():
        setattr(owner, name, value)


def _set_given(function: Any, args: Any, keywords: Any) -> None:
    function.__setstate__((function.func, args, keywords, None))


@lru_cache(maxsize=1_000)
def _globals(code: CodeType) -> frozenset[str]:
    """Which variables of its module a function reads, those of functions within it included."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return frozenset(own).union(*(_globals(each) for each in code.co_consts if isinstance(each, CodeType)))


def default_states() -> list[tuple[Any, ...]]:
    """What sets the generators of ``random`` and ``numpy.random`` to what they are now."""
    states: list[tuple[Any, ...]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
