"""What a checkpoint may name: its hyper-parameters and states of callbacks, checked before they are used."""

from __future__ import annotations

import codecs
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from attention_modules.mechanism import ENTRY_POINT_GROUP
from lightning_tasks.hparams import import_object
from lightning_tasks.trust import KINDS, LIBRARIES, TRUST_IT, check_package, last_name, stored_object

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
# None: what is built in, as torch.relu
_COMPUTE = (None, "torch", "torch.nn.functional", "torch.nn.init", "torch._C._nn")
_NUMBERS = (type(None), bool, int, float, complex, bytes, date, Tensor, torch.dtype, torch.device)
_MAX_ENTRIES = 1_000_000
_MAX_FILE = 2**20  # bytes of a file that may be a configuration
_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "module_arguments")  # Lightning reads its former keys too


def check_checkpoint(content: Mapping[str, Any], allowed: Collection[str] | None, path: str | Path) -> None:
    """Check what a whole checkpoint names: in its hyper-parameters, and in the states of callbacks (swaps).

    Raises:
        ValueError: as :func:`check_stored`.
    """
    _refuse_disguise(content, str(path))
    for key in (*_HYPER_PARAMETERS, "callbacks"):
        place = key if key == "callbacks" else _HYPER_PARAMETERS[0]
        check_stored(content.get(key, {}), allowed, path, place)


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
        given: what the user gave in its place; names that are equal there came from her, and are not looked at.

    Raises:
        ValueError: as :func:`stored_object`, and where something would run code of another origin: Hugging Face's
            remote code, a configuration of mmsegmentation that is a file of Python.
    """
    if allowed is None:
        return
    try:
        _check_size(value, place)
        _check(value, allowed, place, given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source}: {place} is nested too deeply, or holds itself; {TRUST_IT}") from error


def _refuse_disguise(value: Mapping[str, Any], place: str) -> None:
    """Refuse an OrderedDict that a file gave attributes, such as an ``items`` that hides some of its entries."""
    attributes = set(getattr(value, "__dict__", ())) - {"_metadata"}  # which torch gives to state dicts
    if attributes:
        raise ValueError(f"{place} is a dict with attributes of its own, {sorted(attributes)}; {TRUST_IT}")


def _check_size(value: Any, place: str) -> None:
    """Refuse data that stands for too much: parts that are shared make a small file of any size."""
    waiting, count = [value], 0
    while waiting:
        entry = waiting.pop()
        count += 1
        if count > _MAX_ENTRIES:
            raise ValueError(f"{place} has more than {_MAX_ENTRIES:,} entries; {TRUST_IT}")
        if isinstance(entry, dict):
            waiting.extend(dict.values(entry))
        elif isinstance(entry, (list, tuple, set, frozenset)):
            waiting.extend(entry)


def _check(value: Any, allowed: Collection[str], place: str, given: Any) -> None:
    if isinstance(value, Mapping):
        _refuse_disguise(value, place)
        known = given if isinstance(given, Mapping) else {}
        for key, entry in value.items():
            if isinstance(entry, (str, Mapping)) and known.get(key) == entry:
                continue
            _check_remote_code(str(key), entry, place)
            if key == "class_path":
                if not isinstance(entry, str) or "." in entry:  # a bare name is one of the place's own modules
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
    elif isinstance(value, (str, os.PathLike)):
        if value == given:
            return
        value = os.fspath(value)
        inner = _data_in(value)
        if isinstance(inner, (Mapping, list)):
            _check(inner, allowed, place, None)
        elif _is_name(value, last_name(place)):
            stored_object(value, allowed, place)
        elif last_name(place) not in KINDS and _is_importable(value):  # which a type of the module may ask to import
            check_package(value.partition(".")[0], value, allowed, place)
            _check_callable(value, allowed, place)
    elif not isinstance(value, _NUMBERS):
        raise ValueError(f"{place} is a {type(value).__name__}, which is no plain data; {TRUST_IT}")


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


def _check_remote_code(key: str, entry: Any, place: str) -> None:
    """Refuse settings by which Hugging Face or mmsegmentation would run code that a file or a hub holds."""
    remote = key in ("auto_map", "trust_remote_code") and entry
    kernels = key.endswith("_implementation") and "/" in str(entry)  # Hugging Face gets compiled code of that name
    python = key == "mmseg_config" and ("/" in str(entry) or str(entry).endswith(".py"))
    classes = key == "cfg_options" and any(name in ("type", "_scope_") for name in _option_names(entry))
    if remote or kernels or python or classes:
        raise ValueError(
            f"{place}.{key} is {entry!r}, by which code would be run that is not attnswap's; give it in your own "
            f"configuration, or, {TRUST_IT}"
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


def _check_callable(path: str, allowed: Collection[str], place: str) -> None:
    """Refuse a function of a library where a type may ask for any callable, but for those of torch that compute.

    Raises:
        ValueError, TypeError: as :func:`stored_object`.
    """
    if path.partition(".")[0] not in LIBRARIES:
        return
    try:
        found = import_object(path)
    except (ImportError, ValueError):  # it stands for nothing
        return
    if callable(found) and getattr(found, "__module__", None) not in _COMPUTE:
        stored_object(path, allowed, place)


def _data_in(text: str) -> Any:
    """What the command line would make of a string where a type takes more: YAML, or a file of it.

    Raises:
        ValueError: if it repeats or holds itself, as no honest one does, or is a file of text above 1 MiB.
    """
    source, path = text, os.path.expanduser(text.removeprefix("file://"))  # the command line knows both spellings
    try:
        if os.path.isfile(path):
            if _is_text(path) and os.path.getsize(path) > _MAX_FILE:
                raise _TooLarge
            source = Path(path).read_text(encoding="utf-8") if _is_text(path) else ""
        if "*" not in source or not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(source)):
            return yaml.safe_load(source)
    except _TooLarge:
        raise ValueError(
            f"{text!r} names a file of text above 1 MiB, which could be a configuration; give the same value yourself "
            f"on the command line, or, {TRUST_IT}"
        ) from None
    except (yaml.YAMLError, OSError, ValueError):  # it is neither; a date that does not exist is a ValueError
        return None
    except RecursionError:
        pass
    raise ValueError(f"YAML that repeats itself or is nested too deeply stands in a string, {text[:80]!r}; {TRUST_IT}")


class _TooLarge(Exception):
    """A file that is too large to be looked into."""


def _is_text(path: str) -> bool:
    """Whether a file may be YAML, which knows no byte 0 and no wrong UTF-8."""
    with open(path, "rb") as file:
        head = file.read(4096)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _is_importable(value: str) -> bool:
    """Whether a string has the form of a dotted path, and its first part is a module that can be imported."""
    package, *names = value.split(".")
    if not names or not all(name.isidentifier() for name in (package, *names)):
        return False
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _is_name(value: str, place: str) -> bool:
    """Whether a string at a place would be imported; the name of a timm model may have a dot too."""
    if place not in KINDS or "." not in value:
        return False
    try:
        return place != "model" or importlib.util.find_spec(value.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
