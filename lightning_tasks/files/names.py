"""What a file may name: a closed list, in which a name is looked up before it is imported. Other text stays text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points
from types import FunctionType, ModuleType
from typing import Any

import jsonargparse
from jsonargparse import _common

from attention_modules.function import is_attention_function
from attention_modules.mechanism import ENTRY_POINT_GROUP, is_registered
from lightning_tasks.training.hparams import import_object
from lightning_tasks.training.kinds import KINDS, LIBRARIES, check_kind, defined_as, described, is_users_module, kind_of
from lightning_tasks.working_folder import comes_from_working_folder

_PARTS = {"torch": ("torch.nn.", "torch.optim.")}  # the rest of torch holds what compiles, sends and reads files
_IN_STRINGS = (
    *("attention_modules", "torch.nn", "torch.optim", "torch._C._nn", "lightning.pytorch.callbacks"),
    *("lightning.pytorch.loggers", "pytorch_lightning.callbacks", "pytorch_lightning.loggers"),
)
TRUST_IT = "if you trust the file, give --trust_checkpoint (in Python: trust_checkpoint=True)"
GIVE_IT = f"give the argument yourself, on the command line or by keyword, or, {TRUST_IT}"


def stored_object(path: Any, allowed: Collection[str], place: str) -> Any:
    """What a name in a file stands for: on the closed list, and of the kind that its place takes.

    Args:
        path: the dotted path.
        allowed: packages and paths beside `LIBRARIES`, see :func:`allowed_names`.
        place: where it stands.

    Raises:
        ValueError: it is of another package, of torch neither in torch.nn nor in torch.optim, or not imported yet.
        TypeError: it is no dotted path, or as :func:`check_kind`; a function counts where it is a named factory or a
            mechanism that is registered or that the user's configuration names.
    """
    if not is_dotted(path):  # by a bare name the command line takes any class that is loaded
        raise TypeError(f"{place} has {path!r} where a dotted path is needed; {GIVE_IT}")
    package, kind = path.partition(".")[0], kind_of(place)
    reason, target = _refusal(path, allowed), None
    if not reason:
        target = import_object(path) if _is_library(package) or package in allowed else _loaded(path)
        home = target.__name__ if isinstance(target, ModuleType) else str(getattr(target, "__module__", None))
        reason = "which your program has not imported" if target is None else _refusal(home, allowed)
    if reason:
        raise ValueError(f"{place} names {path!r}, {reason}. It was not called; {_cure(place)}")
    named = is_attention_function(target) and not {path, defined_as(target)}.isdisjoint(allowed)
    mechanism = kind is KINDS["mechanism"] and (named or is_registered(target))
    if not isinstance(target, type) and defined_as(target) not in kind.factories and not mechanism:
        known = " that @register_mechanism(NAME) registers" if kind is KINDS["mechanism"] else ""
        raise TypeError(
            f"{place} names {path!r}, which is {described(target)}: from a checkpoint it must be {kind.words}{known}. "
            f"It was not called; {_cure(place, callable(target))}"
        )
    check_kind(target, place, path)
    return target


def is_dotted(text: Any) -> bool:
    """Whether something is text of the form of a dotted path."""
    return isinstance(text, str) and "." in text and all(part.isidentifier() for part in text.split("."))


def allowed_names(*named: Any) -> frozenset[str]:
    """What a file may name beside `LIBRARIES`: top-level packages, and whole paths.

    They are those of mechanisms that installed packages offer, and of what the user named, at any depth.
    """
    offered = {entry.value.partition(":")[0].partition(".")[0] for entry in entry_points(group=ENTRY_POINT_GROUP)}
    paths = set(_paths_in(named))
    return frozenset(offered | paths | {path.partition(".")[0] for path in paths})


@contextlib.contextmanager
def closed_imports(allowed: Collection[str] | None, stored: Any, given: Any = None) -> Iterator[None]:
    """Have jsonargparse import what is on the closed list and no more, whatever it reads in a string or a file.

    Args:
        allowed: as for :func:`stored_object`; None where the file is trusted, and nothing is closed.
        stored: data of the file, whose names were looked up.
        given: data of the user's, in which any string may be a name.
    """
    if allowed is None:
        yield
        return
    paths = {*filter(is_dotted, allowed), *_paths_in(stored), *_paths_in(given, everywhere=True)}
    paths |= {defined_as(target) for path in paths if (target := _loaded(path)) is not None}
    packages = {name for name in allowed if "." not in name and name not in LIBRARIES | sys.stdlib_module_names}
    names = [name for name in {*_IN_STRINGS, *packages, *paths} if name.partition(".")[0] != "jsonargparse"]
    before = dict(_common.parsing_settings)
    jsonargparse.set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=names)
    try:
        yield
    finally:
        _common.parsing_settings.update(before)


def _paths_in(value: Any, key: str = "", everywhere: bool = False) -> Iterator[str]:
    """Dotted paths in a configuration: where a name stands, or wherever one may."""
    if isinstance(value, (type, FunctionType)):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _paths_in(entry, str(name), everywhere)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _paths_in(entry, key, everywhere)
    elif is_dotted(value) and (everywhere or key == "class_path" or key in KINDS):
        yield str(value)


def _refusal(home: str, allowed: Collection[str]) -> str:
    """Why a file may name nothing that is defined in this module, "" where it may."""
    package = home.partition(".")[0]
    if not _is_library(package) and package not in allowed and not is_users_module(package):
        return (
            f"and a checkpoint may name nothing of the package {package!r}: it is neither attnswap, torch, "
            "torchvision, torchmetrics, lightning, timm nor transformers, nor does your own configuration name it"
        )
    if not f"{home}.".startswith(_PARTS.get(package, "")):
        return "and of torch a checkpoint may name what is in torch.nn and torch.optim"
    return ""


def _is_library(package: str) -> bool:
    """Whether a package is one of `LIBRARIES`; one that is not installed may be a file of the working folder."""
    return package in LIBRARIES and not comes_from_working_folder(package)


def _loaded(path: str) -> Any:
    """What a path stands for in a module that is imported already, None where it is not there."""
    module, _, name = path.rpartition(".")
    if path.partition(".")[0] in LIBRARIES:  # ours import what they offer when it is asked for
        return getattr(sys.modules.get(module), name, None)
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _cure(place: str, function: bool = False) -> str:
    """The cure where a name is refused; what a callback swapped is no argument that one can give."""
    if not place.endswith(".plan.mechanism"):
        return GIVE_IT
    first = "put @register_mechanism(NAME) above the function" if function else "import the module that defines it"
    return f"{first} before you load the file; or, {TRUST_IT}"
