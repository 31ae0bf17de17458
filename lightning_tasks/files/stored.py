"""What data of a file may hold: its hyper-parameters and states of callbacks, checked before they are used."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import register_type
from torch import Tensor

from lightning_tasks.files.names import GIVE_IT, TRUST_IT, is_dotted, stored_object
from lightning_tasks.training.kinds import KINDS, last_name

_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
_KEYS = (type(None), bool, int, float, str)
_PLAIN = (type(None), bool, int, float, complex, bytes, date, os.PathLike, Tensor, torch.dtype, torch.device)
_MAX_ENTRIES = 1_000_000
_HYPER_PARAMETERS = ("hyper_parameters", "hparams", "module_arguments")  # Lightning reads its former keys too
_SOURCES = {"url", "hf_hub_id", "hf_hub_filename", "source"}  # of weights, in timm's `pretrained_cfg`


class Text(str):
    """Text of a file, which jsonargparse leaves as it is: it reads plain `str` anew, as YAML or as a file's name."""

    __slots__ = ()


register_type(Text, Text, Text, fail_already_registered=False)


def check_checkpoint(
    content: Mapping[str, Any],
    allowed: Collection[str] | None,
    path: str | Path,
    hparams_file: str | Path | None = None,
) -> None:
    """Check what a whole checkpoint names: in its hyper-parameters (or the file in their place), and in swaps.

    Raises:
        ValueError: as :func:`check_stored`.
    """
    if allowed is None:
        return
    _refuse_attributes(content, str(path))
    plain_copy(content.get("hparams_type"), path, "hparams_type")
    for key in (*_HYPER_PARAMETERS, "callbacks"):
        check_stored(content.get(key, {}), allowed, path, key if key == "callbacks" else _HYPER_PARAMETERS[0])
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
        allowed: see :func:`.allowed_names`; None where the file is trusted.
        source: the file.
        place: where the data stands in it.
        given: what the user gave in its place; names that are equal there came from her, and are not looked at. What
            the file has must be a :func:`plain_copy` before the two are joined.

    Raises:
        ValueError: as :func:`.stored_object` and :func:`plain_copy`, and where a library would run code of another
            origin (remote code, a configuration that is a file of Python), or write a file that it downloads.
    """
    if allowed is None:
        return
    try:
        _check(value if given is not None else plain_copy(value, source, place), allowed, place, given)
    except TypeError as error:
        raise ValueError(f"{source}: {error}") from error
    except ValueError as error:
        raise error if str(error).startswith(str(source)) else ValueError(f"{source}: {error}") from error


def plain_copy(value: Any, source: str | Path, place: str = "hyper_parameters") -> Any:
    """A copy of data of a file of plain dicts and lists, whose strings stay what they are (:class:`Text`).

    Raises:
        ValueError: if there is an object, a dict with attributes of its own, such as an ``items`` that hides entries,
            or more than a million entries (parts that are shared make a small file of any size).
    """
    count = 0

    def copied(entry: Any, where: str) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_ENTRIES:
            raise ValueError(f"{source}: {place} has more than {_MAX_ENTRIES:,} entries; {TRUST_IT}")
        if isinstance(entry, dict):
            _refuse_attributes(entry, f"{source}: {where}")
            if strange := [key for key in dict.keys(entry) if not isinstance(key, _KEYS)]:
                raise ValueError(f"{source}: {where} has the key {strange[0]!r}, which is no text; {TRUST_IT}")
            return {key: copied(inner, f"{where[:200]}.{key}") for key, inner in dict.items(entry)}
        if isinstance(entry, (list, tuple, set, frozenset)):
            return [copied(inner, f"{where[:200]}[{index}]") for index, inner in enumerate(entry)]
        if not isinstance(entry, (str, *_PLAIN)):
            raise ValueError(f"{source}: {where} is a {type(entry).__name__}, which is no plain data; {TRUST_IT}")
        return Text(entry) if isinstance(entry, str) else entry

    try:
        return copied(value, place)
    except RecursionError as error:
        raise ValueError(f"{source}: {place} is nested too deeply, or holds itself; {TRUST_IT}") from error


def _refuse_attributes(value: Mapping[str, Any], place: str) -> None:
    if attributes := set(getattr(value, "__dict__", ())) - {"_metadata"}:  # which torch gives to state dicts
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
    if isinstance(value, (str, bool, dict)) and value == given:
        return
    _check_settings(last_name(place), value, place)
    if isinstance(value, dict):
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
    elif isinstance(value, (list, tuple)):
        before = given if isinstance(given, (list, tuple)) and len(given) == len(value) else [None] * len(value)
        for index, entry in enumerate(value):
            _check(entry, allowed, f"{place}[{index}]", before[index])
    elif isinstance(value, str) and _is_name(value, last_name(place)):
        stored_object(value, allowed, place)


def _check_settings(key: str, entry: Any, place: str) -> None:
    """Refuse settings by which a library would run code that a file or a hub holds, or write what it downloads."""
    remote = key in ("auto_map", "trust_remote_code") and entry
    kernels = "_implementation" in key and "/" in str(entry)  # Hugging Face gets compiled code of that name
    python = key == "mmseg_config" and ("/" in str(entry) or str(entry).endswith(".py"))
    classes = key == "cfg_options" and not {"type", "_scope_"}.isdisjoint(_option_names(entry))
    download = key == "cache_dir" and entry is not None  # timm puts the file of any URL there
    weights = key.startswith("pretrained_cfg") and not _SOURCES.isdisjoint(_option_names(entry))
    if remote or kernels or python or classes or download or weights:
        raise ValueError(
            f"{place} is {entry!r}, by which code would be run that is not attnswap's, or a file written; {GIVE_IT}"
        )


def _option_names(options: Any) -> Iterator[str]:
    """The last parts of all keys in options by dotted path."""
    for key, entry in options.items() if isinstance(options, Mapping) else ():
        yield str(key).rpartition(".")[2]
        yield from _option_names(entry)
    for entry in options if isinstance(options, (list, tuple)) else ():
        yield from _option_names(entry)


def _is_name(text: str, name: str) -> bool:
    """Whether a string at a place would be imported; the name of a timm model may have a dot too."""
    if name != "model":
        return name in KINDS and "." in text
    package = text.partition(".")[0]
    return is_dotted(text) and (package in sys.modules or find_spec(package) is not None)
