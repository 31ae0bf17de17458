"""What a checkpoint may name: its hyper-parameters and states of callbacks, checked before they are used."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import date
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import jsonargparse
import torch
import yaml
from torch import Tensor

from attention_modules.mechanism import ENTRY_POINT_GROUP
from lightning_tasks.hparams import import_object
from lightning_tasks.trust import GIVE_IT, KINDS, LIBRARIES, TRUST_IT, check_package, last_name, stored_object

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_COMPUTE = ("torch.nn.functional", "torch.nn.init")
_SPEAKING = ("antigravity", "this")  # modules of the standard library that do something when they are imported
_KEYS = (type(None), bool, int, float, str)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, date, os.PathLike, Tensor, torch.dtype, torch.device)
_MAX_ENTRIES = 1_000_000
_MAX_FILE = 2**20  # bytes of a file that may be a configuration
_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "module_arguments")  # Lightning reads its former keys too
_SOURCES = {"url", "hf_hub_id", "hf_hub_filename", "source"}  # of weights, in timm's `pretrained_cfg`


def check_checkpoint(
    content: Mapping[str, Any],
    allowed: Collection[str] | None,
    path: str | Path,
    hparams_file: str | Path | None = None,
) -> None:
    """Check what a whole checkpoint names: in its hyper-parameters, and in the states of callbacks (swaps).

    Args:
        content: the checkpoint.
        allowed: as :func:`check_stored`.
        path: its file.
        hparams_file: the file whose hyper-parameters Lightning takes in place of the checkpoint's.

    Raises:
        ValueError: as :func:`check_stored`.
    """
    if allowed is None:
        return
    check_form({key: value for key, value in content.items() if key == "hparams_type"}, path)
    _refuse_attributes(content, str(path))
    for key in (*_HYPER_PARAMETERS, "callbacks"):
        place = key if key == "callbacks" else _HYPER_PARAMETERS[0]
        check_stored(content.get(key, {}), allowed, path, place)
    if hparams_file is not None:
        check_stored(_hparams_in(hparams_file), allowed, hparams_file)


def check_stored(
    value: Any,
    allowed: Collection[str] | None,
    source: str | Path,
    place: str = "hyper_parameters",
    given: Any = None,
) -> None:
    """Check everything that data of a file names, at any depth, before it is used.

    Args:
        value: the data, e.g. hyper-parameters.
        allowed: see :func:`check_origin`; None where the file is trusted.
        source: the file.
        place: where the data stands in it.
        given: what the user gave in its place; names that are equal there came from her, and are not looked at. What
            the file has must have passed :func:`check_form` before the two were joined.

    Raises:
        ValueError: as :func:`stored_object` and :func:`check_form`, and where something would run code of another
            origin (Hugging Face's remote code, a configuration of mmsegmentation that is a file of Python), or write a
            file that it downloads.
    """
    if allowed is None:
        return
    if given is None:
        check_form(value, source, place)
    try:
        _check(value, allowed, place, given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source}: {place} is nested too deeply, or holds itself; {TRUST_IT}") from error


def check_form(value: Any, source: str | Path, place: str = "hyper_parameters") -> None:
    """Check that data of a file is plain: nothing in it reads otherwise than it was checked.

    Raises:
        ValueError: if there is an object, a dict with attributes of its own, such as an ``items`` that hides entries,
            or more than a million entries (parts that are shared make a small file of any size).
    """
    waiting, count = [(place, value)], 0
    while waiting:
        where, entry = waiting.pop()
        count += 1
        if count > _MAX_ENTRIES:
            raise ValueError(f"{source}: {place} has more than {_MAX_ENTRIES:,} entries; {TRUST_IT}")
        if isinstance(entry, dict):
            _refuse_attributes(entry, f"{source}: {where}")
            if strange := [key for key in dict.keys(entry) if not isinstance(key, _KEYS)]:
                raise ValueError(f"{source}: {where} has the key {strange[0]!r}, which is no text; {TRUST_IT}")
            waiting.extend((f"{where[:200]}.{key}", inner) for key, inner in dict.items(entry))
        elif isinstance(entry, (list, tuple, set, frozenset)):
            waiting.extend((f"{where[:200]}[{index}]", inner) for index, inner in enumerate(entry))
        elif not isinstance(entry, _PLAIN):
            raise ValueError(f"{source}: {where} is a {type(entry).__name__}, which is no plain data; {TRUST_IT}")


def _refuse_attributes(value: Mapping[str, Any], place: str) -> None:
    attributes = set(getattr(value, "__dict__", ())) - {"_metadata"}  # which torch gives to state dicts
    if attributes:
        raise ValueError(f"{place} is a dict with attributes of its own, {sorted(attributes)}; {TRUST_IT}")


def _hparams_in(file: str | Path) -> Any:
    """What Lightning will read in a file of hyper-parameters, with the values of OmegaConf's interpolations."""
    from lightning.pytorch.core.saving import load_hparams_from_tags_csv, load_hparams_from_yaml

    if str(file).lower().endswith(".csv"):
        return load_hparams_from_tags_csv(file)
    found: Any = load_hparams_from_yaml(file)
    if not isinstance(found, dict) and hasattr(found, "_metadata"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(found, resolve=True)
    return found


def _check(value: Any, allowed: Collection[str], place: str, given: Any) -> None:
    if isinstance(value, Mapping):
        known = given if isinstance(given, Mapping) else {}
        for key, entry in value.items():
            if isinstance(entry, (str, Mapping)) and known.get(key) == entry:
                continue
            _check_settings(str(key), entry, place)
            if key == "class_path":
                stored_object(entry, allowed, place)
            elif key == "_instantiator":
                if entry not in _INSTANTIATORS:
                    raise ValueError(f"{place}.{key} is {entry!r}, which was not called; {TRUST_IT}")
            elif "." in str(key):  # the command line's spelling of what is nested
                first, _, rest = str(key).partition(".")
                _check({first: {rest: entry}}, allowed, place, {})
            else:
                _check(entry, allowed, place if key == "init_args" else f"{place}.{key}", known.get(key))
    elif isinstance(value, (set, frozenset)):
        _check(list(value), allowed, place, None)
    elif isinstance(value, (list, tuple)):
        before = given if isinstance(given, (list, tuple)) and len(given) == len(value) else [None] * len(value)
        for index, entry in enumerate(value):
            _check(entry, allowed, f"{place}[{index}]", before[index])
    elif isinstance(value, (str, os.PathLike)) and value != given:
        _check_text(os.fspath(value), allowed, place)


def _check_text(text: str, allowed: Collection[str], place: str) -> None:
    """Check a string as whatever it may be read: a file, YAML, and a name."""
    _check_file(text, allowed, place)
    inner = _data_in(text)
    if inner != text:
        _check(inner, allowed, place, None)
    if _is_name(text, last_name(place)) or (
        last_name(place) not in KINDS and _stands_for_something(text, allowed, place)
    ):
        stored_object(text, allowed, place)


def allowed_packages(*named: Any) -> frozenset[str]:
    """Top-level packages that a checkpoint may name beside `LIBRARIES`.

    They are those of mechanisms that installed packages offer, and those that the user named.

    Args:
        named: configurations of hers, at any depth, and classes.
    """
    offered = {entry.value.partition(":")[0].partition(".")[0] for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return frozenset(offered.union(*(set(_packages(each)) for each in named)))


def _packages(value: Any, name: str = "") -> Iterator[str]:
    """Top-level packages of the paths in a configuration."""
    if isinstance(value, type):
        yield value.__module__.partition(".")[0]
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _packages(entry, str(key))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _packages(entry, name)
    elif isinstance(value, str) and "." in value and (name in KINDS or name == "class_path"):
        yield value.partition(".")[0]


def _check_settings(key: str, entry: Any, place: str) -> None:
    """Refuse settings by which a library would run code that a file or a hub holds, or write what it downloads."""
    remote = key in ("auto_map", "trust_remote_code") and entry
    kernels = key.endswith("_implementation") and "/" in str(entry)  # Hugging Face gets compiled code of that name
    python = key == "mmseg_config" and ("/" in str(entry) or str(entry).endswith(".py"))
    classes = key == "cfg_options" and any(name in ("type", "_scope_") for name in _option_names(entry))
    # timm puts the file of any URL into the folder of that name
    download = key == "cache_dir" and entry is not None
    weights = key.startswith("pretrained_cfg") and not _SOURCES.isdisjoint(_option_names(entry))
    if remote or kernels or python or classes or download or weights:
        raise ValueError(
            f"{place}.{key} is {entry!r}, by which code would be run that is not attnswap's, or a file written; "
            f"{GIVE_IT}"
        )


def _option_names(options: Any) -> Iterator[str]:
    """The last parts of all keys in options by dotted path."""
    if isinstance(options, Mapping):
        for key, entry in options.items():
            yield str(key).rpartition(".")[2]
            yield from _option_names(entry)
    elif isinstance(options, (list, tuple)):
        for entry in options:
            yield from _option_names(entry)


def _stands_for_something(path: str, allowed: Collection[str], place: str) -> bool:
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


def _data_in(text: str) -> Any:
    """What the command line makes of a string where a type takes more than text.

    Raises:
        ValueError: if it repeats or holds itself, as no honest one does.
    """
    try:
        with suppress(yaml.YAMLError, ValueError):  # of which the command line's own reader may know more
            yaml.compose(text)
        if "*" not in text or not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            return jsonargparse.get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError):  # it is no YAML; a date that does not exist is a ValueError
        return text
    except RecursionError:
        pass
    raise ValueError(f"YAML that repeats itself or is nested too deeply stands in a string, {text[:80]!r}; {TRUST_IT}")


def _check_file(name: str, allowed: Collection[str], place: str) -> None:
    """Refuse the name of a file of settings, which the command line would read, and others that this one names.

    Raises:
        ValueError: if there is such a file, or one of text above 1 MiB.
    """
    path = os.path.expanduser(name.removeprefix("file://"))  # the command line knows both spellings
    try:
        if not os.path.isfile(path):
            return
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE + 1)
    except (OSError, ValueError):  # a name that no file can have
        return
    if b"\0" in content[:4096]:  # which YAML never has, and files of weights and pictures have
        return
    large = len(content) > _MAX_FILE
    inner = "" if large else _data_in(content.decode(errors="replace"))
    if large or isinstance(inner, (Mapping, list)):
        what = "is of text above 1 MiB, which may be settings" if large else "holds settings"
        raise ValueError(f"{place} names the file {name!r}, which {what}; {GIVE_IT}")
    _check(inner, allowed, place, None)


def _is_name(value: str, place: str) -> bool:
    """Whether a string at a place would be imported; the name of a timm model may have a dot too."""
    if place not in KINDS or "." not in value:
        return False
    try:
        return place != "model" or importlib.util.find_spec(value.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
