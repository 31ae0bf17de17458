"""Copies of what code keeps outside of Parameters, so that a call of ours changes none of it."""

from __future__ import annotations

import copy
import copyreg
import dis
import io
import math
import pickle
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn

# Whose objects and functions are left as they are: they keep nothing of a call, or all that a program holds.
_LIBRARIES = frozenset({"accelerate", "attention_modules", "lightning", "lightning_tasks", "peft"})
_LIBRARIES |= {"pytorch_lightning", "timm", "torch", "transformers", "triton", "wandb"}
# Modules of Python whose objects hold what they are given; those of others may be waited for, or stand for a file.
_HOLDERS = frozenset({"argparse", "array", "builtins", "collections", "functools", "itertools", "random", "types"})
_LIVE = ("queue.", "threading.", "multiprocessing.", "concurrent.", "asyncio.", "io.", "socket.", "torch.utils.data.")
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset, deque})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SHARED = (type, nn.Module, nn.Parameter, Enum, FunctionType, BuiltinFunctionType, ModuleType, *ProxyTypes)
MOST_NUMBERS, MOST_OBJECTS = 1 << 26, 1 << 17  # of what one attribute holds
Place = tuple[Callable[[dict[str, Any]], object], dict[str, Any]]  # what sets, and what is there


def own_copies(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of dicts and of all that they hold: what is one object, or memory, in the original is one in the copies.

    Modules, Parameters, functions, classes, objects of libraries and what cannot be pickled stay the same. So does an
    entry, other than a tensor, whose copy is an error, or that holds more than ``MOST_OBJECTS``, or ``MOST_NUMBERS``
    beside those of tensors that are entries.
    """
    if not values:
        return []
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        with suppress(Exception):
            return list(_copy_of_all(values))
        entries, apart = [value for each in values for value in each.values()], []
        tensors = {_memory(value) for value in entries}
        for value in entries:
            try:
                _copy_of_all(value, uncounted=tensors)
            except Exception:  # of code that pickling calls, or a list within a list within a list ...
                apart += [] if isinstance(value, Tensor) else [value]
        with suppress(Exception):
            return list(_copy_of_all(values, apart, None))
        return [{name: _copied(value, None) for name, value in each.items()} for each in values]


def _copy_of_all(value: Any, apart: Sequence[Any] = (), uncounted: Set[int] | None = frozenset()) -> Any:
    """A copy; with no limit where ``uncounted``, the memory of tensors that do not count, is None."""
    written = io.BytesIO()
    (writer := _Writer(written, apart, uncounted)).dump(value)
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
    """Notes in ``held`` what it does not write: arrays and generators, to be copied, and what stays the same."""

    def __init__(self, file: io.BytesIO, apart: Sequence[Any], uncounted: Set[int] | None) -> None:
        super().__init__(file, protocol=4)
        self.held: list[Any] = []  # which are held, so that none of another's identity follows
        self._places: dict[int, int] = {}
        self._apart = {id(value) for value in apart}
        self._uncounted = uncounted or frozenset()
        self._numbers: float = math.inf if uncounted is None else MOST_NUMBERS
        self._objects: float = math.inf if uncounted is None else MOST_OBJECTS

    def persistent_id(self, value: Any) -> int | None:
        self._objects -= 1
        kind = type(value)
        if kind is _Same:
            return self._place(value.of)
        if id(value) in self._apart:
            return self._place(value)
        if (kind in _PLAIN or _is_written(kind)) and not _is_array(value):
            self._count(0)
            return None
        return self._place(value)

    def _place(self, value: Any) -> int:
        place = self._places.setdefault(id(value), len(self.held))
        if place == len(self.held):
            self.held.append(value)
            counts = _is_copied(value) and _memory(value) not in self._uncounted
            self._count(value.size if _is_array(value) else value.numel() if counts else 0)
        return place

    def _count(self, numbers: int) -> None:
        self._numbers -= numbers
        if min(self._numbers, self._objects) < 0:
            raise OverflowError("more than is copied")

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return MethodType, (value.__func__, value.__self__)
        kind = type(value)
        with suppress(Exception):
            if kind.__module__ not in _HOLDERS and object.__new__(kind) is not None:  # an error for those of C
                return object.__new__, (kind,), (_own(value), _slots(value)), None, None, _fill
        with suppress(Exception):
            if isinstance(made := value.__reduce_ex__(4), tuple):
                return made
        return _itself, (_Same(value),)

    def copies(self) -> list[Any]:
        """What stands in the places of what was not written."""
        known: dict[int, Any] = {}
        memory = [_memory(value) for value in self.held]
        shared = {at for at, times in Counter(memory).items() if at and times > 1}
        return [
            value if id(value) in self._apart else _copied(value, known if at in shared else None)
            for value, at in zip(self.held, memory, strict=True)
        ]


class _Reader(pickle.Unpickler):
    def __init__(self, written: io.BytesIO, writer: _Writer) -> None:
        written.seek(0)
        super().__init__(written)
        self._copies = writer.copies()

    def persistent_load(self, place: int) -> Any:
        return self._copies[place]


def _own(value: Any) -> dict[Any, Any]:
    """The attributes of an object, without code of its class."""
    with suppress(AttributeError):
        return dict(object.__getattribute__(value, "__dict__"))
    return {}


def _slots(value: Any) -> dict[str, Any]:
    found = {}
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        with suppress(AttributeError):
            found[name] = object.__getattribute__(value, name)
    return found


def _fill(made: Any, held: tuple[dict[Any, Any], dict[str, Any]]) -> None:
    own, slots = held
    if own:
        object.__getattribute__(made, "__dict__").update(own)
    for name, value in slots.items():
        object.__setattr__(made, name, value)


def _is_written(kind: type) -> bool:
    """Whether a copy of a class's objects is made of what they hold; not of a torch dataset, or a queue of threads."""
    if kind is object or issubclass(kind, (*_SHARED, Tensor, torch.Generator)) or hasattr(kind, "__del__"):
        return False
    live = (each for each in kind.__mro__ if f"{each.__module__}.".startswith(_LIVE))
    return issubclass(kind, _CONTAINERS) or (is_elsewhere(kind.__module__) and next(live, None) is None)


def is_elsewhere(module: str) -> bool:
    """Whether a module is of no library, but for those of Python whose objects hold what they are given."""
    root = module.partition(".")[0]
    return root not in _LIBRARIES and (root in _HOLDERS or root not in sys.stdlib_module_names)


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy" and not value.dtype.hasobject


def _is_copied(value: Any) -> bool:
    return issubclass(type(value), Tensor) and not issubclass(type(value), nn.Parameter)


def _memory(value: Any) -> int:
    """Where a tensor that is to be copied has its numbers; 0 of what is to be copied alone."""
    if not _is_copied(value) or value.requires_grad:
        return 0
    with suppress(NotImplementedError, RuntimeError, ValueError):  # sparse, of a transform, or not there yet
        return int(value.untyped_storage()._cdata)
    return 0


def _copied(value: Any, known: dict[int, Any] | None) -> Any:
    """The copy of an array or generator; what is neither, or takes no copy, stays the same."""
    with suppress(Exception):
        if issubclass(type(value), torch.Generator):
            return value.clone_state()
        if _is_array(value):
            return value.copy(order="K")
        if not _is_copied(value):
            return value
        with suppress(Exception):
            if known is not None and value.untyped_storage().nbytes() <= 8 * MOST_NUMBERS:
                return copy.deepcopy(value, known)  # with what views of the same memory share
        return copy_of(value)
    return value


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
            yield partial(put_back, vars(function)), dict(vars(function))
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
    function.__setstate__((function.func, args, keywords, vars(function)))


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
