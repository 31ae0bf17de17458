"""What a checkpoint may name: its hyper-parameters and states of callbacks, checked before they are used."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from attention_modules.mechanism import ENTRY_POINT_GROUP
from lightning_tasks.trust import KINDS, TRUST_IT, last_name, stored_object

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "module_arguments")  # Lightning reads its former keys too


def check_checkpoint(content: Mapping[str, Any], allowed: Collection[str] | None, path: str | Path) -> None:
    """Check what a whole checkpoint names: in its hyper-parameters, and in the states of callbacks (swaps).

    Raises:
        ValueError: as :func:`check_stored`.
    """
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
        _check(value, allowed, place, given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def _check(value: Any, allowed: Collection[str], place: str, given: Any) -> None:
    if isinstance(value, Mapping):
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
            else:
                _check(entry, allowed, place if key == "init_args" else f"{place}.{key}", known.get(key))
    elif isinstance(value, (list, tuple)):
        before = given if isinstance(given, (list, tuple)) and len(given) == len(value) else [None] * len(value)
        for index, entry in enumerate(value):
            _check(entry, allowed, f"{place}[{index}]", before[index])
    elif isinstance(value, str) and value != given and _is_name(value, last_name(place)):
        stored_object(value, allowed, place)


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


def _is_name(value: str, place: str) -> bool:
    """Whether a string at a place would be imported; the name of a timm model may have a dot too."""
    if place not in KINDS or "." not in value:
        return False
    try:
        return place != "model" or importlib.util.find_spec(value.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
