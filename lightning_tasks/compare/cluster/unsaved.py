"""What a fit holds beside its checkpoint, which a process that goes on from it would not have."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_tasks.files.sources import is_in_packages, is_of_attnswap

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SAMPLED = 1 << 24  # numbers of a tensor or array that are read; of a larger one every so-manieth is
_OF_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_HPARAMS = ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams")  # read alone, Lightning makes them
_never_equal = itertools.count()


def unsaved_state(trainer: pl.Trainer) -> dict[str, str]:
    """Digests of what user's objects hold and no checkpoint does, by owner and attribute.

    They are the module, its layers and metrics, the callbacks, the data module, and the training loaders' data sets,
    samplers and collate functions; of the trainer the numbers, as callbacks set them. Who saves and loads state of its
    own is trusted, and so are Lightning and we.
    """
    module = trainer.lightning_module
    loops = trainer.fit_loop.epoch_loop
    logged = [item.value for loop in (loops, loops.val_loop) for item in loop._results.values() if item.meta.on_epoch]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    tensors = [each for each in module.state_dict(keep_vars=True).values() if isinstance(each, Tensor)]
    walk = _Walk([*tensors, *trainer.optimizers, *schedulers, *(each for each in logged if isinstance(each, Metric))])
    numbers = {name: value for name, value in vars(trainer).items() if isinstance(value, (int, float))}
    found = {f"Trainer.{name}": walk.digest(value) for name, value in numbers.items() if name[0] != "_"}
    for name, layer in module.named_modules():
        place = ".".join(filter(None, (type(module).__name__, name)))
        found.update(walk.attributes(place, layer))
    for owner in _others(trainer):
        found.update(walk.attributes(type(owner).__name__, owner))
    return found


def _others(trainer: pl.Trainer) -> Iterator[Any]:
    """The callbacks, the data module, and what its training loaders read."""
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
    yield from callbacks
    yield from filter(None, [vars(trainer).get("datamodule"), trainer.fit_loop._data_source.instance])
    loaders = trainer.fit_loop._combined_loader
    for loader in loaders.flattened if loaders is not None else ():
        for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
            if (part := getattr(loader, name, None)) is not None:
                yield part


def _file_of(kind: type) -> Path | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file).resolve() if file else None


def _is_trusted(owner: Any) -> bool:
    kind = type(owner)
    file = _file_of(kind)
    if kind.__module__.partition(".")[0] in _OF_LIGHTNING or (file is not None and is_of_attnswap(file)):
        return True
    pairs = (("on_save_checkpoint", "on_load_checkpoint"), ("state_dict", "load_state_dict"))
    if isinstance(owner, (pl.LightningModule, pl.LightningDataModule, pl.Callback)):
        bases = (pl.LightningModule, pl.LightningDataModule, pl.Callback)
        return any(all(_is_overridden(kind, name, bases) for name in pair) for pair in pairs)
    return isinstance(owner, nn.Module) and _is_overridden(kind, "get_extra_state", (nn.Module,))


def _is_overridden(kind: type, name: str, bases: tuple[type, ...]) -> bool:
    defined = next((each for each in kind.__mro__ if name in vars(each)), None)
    inherited = {next((each for each in base.__mro__ if name in vars(each)), None) for base in bases}
    return defined is not None and defined not in inherited


class _Walk:
    """Digests of values, in which what a checkpoint holds counts by its place alone."""

    def __init__(self, saved: Iterable[Any]) -> None:
        self._saved = {id(each): each for each in saved}
        self._bases = {*_HPARAMS, *vars(nn.Module()), *vars(pl.LightningModule()), *vars(pl.LightningDataModule())}

    def attributes(self, place: str, owner: Any) -> dict[str, str]:
        """A digest for each attribute of an object, by name."""
        if _is_trusted(owner):
            return {}
        if isinstance(owner, (nn.Module, pl.LightningDataModule)):
            parts = dict(self._of_module(owner))
        elif hasattr(owner, "__dict__") and not isinstance(owner, (FunctionType, MethodType, partial)):
            parts = dict(_fields(owner))
        else:
            return {place: self.digest(owner)}
        return {f"{place}.{name}": self.digest(value) for name, value in parts.items()}

    def _of_module(self, owner: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(owner, Metric):
            count = 0 if id(owner) in self._saved else owner._update_count  # Lightning resets what is logged
            yield "state", [getattr(owner, name) for name in owner._defaults if count]
            return
        if isinstance(owner, MetricCollection):  # only its metrics have something to lose
            return
        if isinstance(owner, nn.Module):
            yield "training", owner.training
            for name, value in (*owner._parameters.items(), *owner._buffers.items()):
                yield name, value
                yield f"{name}.requires_grad", value is not None and value.requires_grad
        file = _file_of(type(owner))
        own = file is None or not is_in_packages(file)
        yield "hparams", {**(vars(owner).get("_hparams") or {})}
        for name, value in vars(owner).items():
            if name not in self._bases and name != "trainer" and (own or type(value) in _PLAIN):
                yield name, value

    def digest(self, value: Any) -> str:
        """One text for all that is within a value."""
        digest = hashlib.sha256()
        try:
            self._feed(digest, value, {})
        except Exception:  # a property, a lock, a proxy of another library
            digest.update(type(value).__qualname__.encode())
        return digest.hexdigest()

    def _feed(self, digest: Any, value: Any, seen: dict[int, Any]) -> None:
        digest.update(f"{type(value).__qualname__}:".encode())
        if isinstance(value, _PLAIN):
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
        elif id(value) in self._saved or id(value) in seen:
            return
        else:
            seen[id(value)] = value
            for part in self._parts(value):
                self._feed(digest, part, seen)

    def _parts(self, value: Any) -> Iterable[Any]:
        """What a value consists of."""
        if isinstance(value, Tensor):
            return tuple(value.shape), _bytes(value.detach().flatten())
        if isinstance(value, np.memmap):
            return value.shape, str(value.filename)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.shape, value.reshape(-1)[:: 1 + value.size // _SAMPLED].tobytes()
        if isinstance(value, np.generic):
            return (value.item(),)
        if isinstance(value, Mapping):
            return itertools.chain.from_iterable(value.items())
        if isinstance(value, Set):
            return sorted(map(self.digest, value))
        if isinstance(value, nn.Module):
            own = () if _is_trusted(value) else self._of_module(value)
            return itertools.chain(*own, *value.named_children())
        if isinstance(value, (ModuleType, type)) or _is_trusted(value):
            return ()
        if (state := _random_state(value)) is not None:
            return (state,)
        if isinstance(value, CellType):
            return (value.cell_contents,)
        if isinstance(value, FunctionType):
            return value.__qualname__, value.__closure__ or ()
        if isinstance(value, MethodType):
            return value.__func__.__qualname__, value.__self__
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if inspect.isgenerator(value):
            return (next(_never_equal),)  # nobody can say where it is
        if type(value) in (list, tuple, deque):
            return value
        return _fields(value)


def _bytes(values: Tensor) -> bytes:
    part = values[:: 1 + values.numel() // _SAMPLED].cpu().contiguous()
    return part.view(torch.uint8).numpy().tobytes() if part.numel() else b""


def _random_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.get_state() if isinstance(value, torch.Generator) else None


def _fields(value: Any) -> list[tuple[Any, Any]]:
    """The attributes of any other object, and its items where it has some; of an iterator how it would be copied."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [name for name in (*slots, *getattr(value, "__dict__", ())) if not name.startswith("__")]
    told = {"epoch"} if hasattr(value, "set_epoch") else set()  # Lightning tells it again
    parts = [(name, getattr(value, name, None)) for name in names if name not in told]
    if isinstance(value, Iterator) and not parts:
        try:
            return [("", value.__reduce__()[1:])]
        except TypeError:
            return [("", next(_never_equal))]
    return [*parts, *((None, each) for each in value)] if isinstance(value, (list, tuple, deque)) else parts
