"""What a checkpoint may name: its hyper-parameters and states of callbacks, checked before they are used."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from attention_modules.mechanism import ENTRY_POINT_GROUP
from lightning_tasks.checkpoints.stored_text import data_in, data_in_file, stands_for_something
from lightning_tasks.training.trust import GIVE_IT, KINDS, TRUST_IT, last_name, stored_object

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_KEYS = (type(None), bool, int, float, str)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, date, os.PathLike, Tensor, torch.dtype, torch.device)
_MAX_ENTRIES = 1_000_000
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
    if isinstance(value, (str, bool, Mapping)) and value == given:
        return
    _check_settings(last_name(place), value, place)
    if isinstance(value, Mapping):
        known = given if isinstance(given, Mapping) else {}
        for key, entry in value.items():
            if key == "class_path":
                if entry != known.get(key):
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
        _check_text(os.fspath(value), allowed, place)


def _check_text(text: str, allowed: Collection[str], place: str) -> None:
    """Check a string as whatever it may be read: a file, YAML, and a name."""
    for inner in (data_in_file(text, place), data_in(text)):
        if inner != text:
            _check(inner, allowed, place, None)
    name = last_name(place)
    if _is_name(text, name) or (name not in KINDS and stands_for_something(text, allowed, place)):
        stored_object(text, allowed, place)


def allowed_packages(*named: Any) -> frozenset[str]:
    """What a checkpoint may name beside `LIBRARIES`: top-level packages, and functions by their whole path.

    They are the packages of mechanisms that installed packages offer, those that the user named, and what she named.

    Args:
        named: configurations of hers, at any depth, classes and functions.
    """
    offered = {entry.value.partition(":")[0].partition(".")[0] for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return frozenset(offered.union(*(set(_packages(each)) for each in named)))


def _packages(value: Any, name: str = "") -> Iterator[str]:
    """Top-level packages of the paths in a configuration, and the paths."""
    if isinstance(value, (type, FunctionType)):
        yield from (value.__module__.partition(".")[0], f"{value.__module__}.{value.__qualname__}")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _packages(entry, str(key))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _packages(entry, name)
    elif isinstance(value, str) and "." in value and (name in KINDS or name == "class_path"):
        yield from (value.partition(".")[0], value)


def _check_settings(key: str, entry: Any, place: str) -> None:
    """Refuse settings by which a library would run code that a file or a hub holds, or write what it downloads."""
    remote = key in ("auto_map", "trust_remote_code") and entry
    kernels = "_implementation" in key and "/" in str(entry)  # Hugging Face gets compiled code of that name
    python = key == "mmseg_config" and ("/" in str(entry) or str(entry).endswith(".py"))
    classes = key == "cfg_options" and any(name in ("type", "_scope_") for name in _option_names(entry))
    # timm puts the file of any URL into the folder of that name
    download = key == "cache_dir" and entry is not None
    weights = key.startswith("pretrained_cfg") and not _SOURCES.isdisjoint(_option_names(entry))
    if remote or kernels or python or classes or download or weights:
        raise ValueError(
            f"{place} is {entry!r}, by which code would be run that is not attnswap's, or a file written; {GIVE_IT}"
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


def _is_name(value: str, place: str) -> bool:
    """Whether a string at a place would be imported; the name of a timm model may have a dot too."""
    if place not in KINDS or "." not in value:
        return False
    try:
        return place != "model" or importlib.util.find_spec(value.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
