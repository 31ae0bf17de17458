"""What a string in a file may be read as: YAML, a file of settings, or the path of something that can be called."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection
from contextlib import suppress
from importlib.machinery import PathFinder
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import jsonargparse
import yaml
from torch import Tensor

from lightning_tasks.training.hparams import import_object
from lightning_tasks.training.trust import GIVE_IT, LIBRARIES, TRUST_IT, check_package

_COMPUTE = ("torch.nn.functional", "torch.nn.init")
_SPEAKING = ("antigravity", "this")  # modules of the standard library that do something when they are imported
_MAX_FILE = 2**20  # bytes of a file that may be a configuration


def stands_for_something(path: str, allowed: Collection[str], place: str) -> bool:
    """Whether a string is the dotted path of what an argument's type may ask to import and call.

    Nothing is imported for it but parts of `LIBRARIES` and of the standard library. Functions of torch that compute,
    and what cannot be called, may be named.

    Raises:
        ValueError: as :func:`check_package`.
    """
    package, *names = path.split(".")
    if not names or not all(name.isidentifier() for name in (package, *names)):
        return False
    if package in LIBRARIES:
        if any(name.startswith("_") for name in names):
            return True
        try:
            found = import_object(path)
        except (ImportError, ValueError):
            return False
        return callable(found) and not _computes(found, path)
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            return False
        if spec.origin is None:  # a folder
            return PathFinder.find_spec(f"{package}.{names[0]}", spec.submodule_search_locations) is not None
        if package in _SPEAKING or not spec.origin.startswith(("frozen", "built-in", sysconfig.get_path("stdlib"))):
            return True
        if "site-packages" in spec.origin or "dist-packages" in spec.origin:
            return True
        importlib.import_module(package)
    return _is_loaded_callable(package, names, path, allowed, place)


def _is_loaded_callable(package: str, names: list[str], path: str, allowed: Collection[str], place: str) -> bool:
    """Whether names within a module that is imported lead to something that can be called, or is to be imported."""
    found: Any = sys.modules[package]
    for count, name in enumerate(names, 1):
        whole = ".".join([package, *names[:count]])
        if whole in sys.modules:
            found = sys.modules[whole]
        elif not isinstance(found, ModuleType) or hasattr(found, "__getattr__"):
            return True
        elif name in vars(found):
            found = vars(found)[name]
        else:
            return hasattr(found, "__path__") and PathFinder.find_spec(whole, found.__path__) is not None
    if isinstance(found, ModuleType):
        check_package(package, path, allowed, place)
    return callable(found)


def _computes(found: Any, path: str) -> bool:
    """Whether this is a function of torch that computes: of `torch.nn.functional`, or a method of tensors too."""
    module, _, name = path.rpartition(".")
    if module in _COMPUTE and isinstance(found, FunctionType):
        return found.__module__ in _COMPUTE
    built_in = isinstance(found, BuiltinFunctionType)
    return built_in and (module in _COMPUTE or (module == "torch" and hasattr(Tensor, name)))


def data_in(text: str) -> Any:
    """What the command line makes of a string where a type takes more than text.

    Raises:
        ValueError: if it repeats or holds itself, as no honest one does.
    """
    try:
        with suppress(yaml.YAMLError, ValueError):  # of which the command line's own reader may know more
            yaml.compose(text)
        if "*" not in text or not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            return jsonargparse.get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, ArithmeticError):  # no YAML, or `!!bool x`
        return text
    except RecursionError:
        pass
    raise ValueError(f"YAML that repeats itself or is nested too deeply stands in a string, {text[:80]!r}; {TRUST_IT}")


def data_in_file(name: str, place: str) -> Any:
    """What the command line makes of the file that a string names: text; None where there is no file of text.

    Raises:
        ValueError: if it holds settings, as those may name files beside it, or is of text above 1 MiB.
    """
    path = os.path.expanduser(name.removeprefix("file://"))  # the command line knows both spellings
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE + 1)
    except (OSError, ValueError):  # a name that no file can have
        return None
    if b"\0" in content[:4096]:  # which YAML never has, and files of weights and images have
        return None
    large = len(content) > _MAX_FILE
    inner = "" if large else data_in(content.decode(errors="replace"))
    if large or isinstance(inner, (dict, list)):
        what = "is of text above 1 MiB, which may be settings" if large else "holds settings"
        raise ValueError(f"{place} names the file {name!r}, which {what}; {GIVE_IT}")
    return inner
