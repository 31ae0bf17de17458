"""What follows `attnswap fit`: names of recipes and classes are spelled out, and refusals name what was meant."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch

import lightning_tasks.models as own_models
from attention_modules.mechanism import did_you_mean, mechanism_class
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import check_recipe, find_recipe, read_settings
from lightning_tasks.training.hparams import import_object, import_path

_FILE_OPTIONS = ("-c", "--config", "--trainer", "--model", "--data")
_ALWAYS_FILES = ("-c", "--config", "--trainer")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CLASSES = {"model": own_models, "optimizer": torch.optim, "scheduler": torch.optim.lr_scheduler}
_MECHANISMS = ("attention", "other_attention")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)':\s*Option '([^']+)' is not accepted")
# What jsonargparse says of each alternative of a type, and again of the value.
_NOISE = re.compile(
    r"Does not validate against any|Subtypes: |Errors:|- Expected a <class 'NoneType'>|- Expected a path but"
    r"|Given value|$"
)
_PACKAGES = {"data": "datamodules", "model": "lightning_tasks"}


def expand_recipe_names(arguments: Sequence[str]) -> list[str]:
    """Replace the names of recipes and parts behind --config, --trainer, --model and --data by the paths they mean.

    Raises:
        UsageError: --config or --trainer names nothing that exists.
    """
    expanded: list[str] = []
    option = ""
    for argument in arguments:
        head, equals, value = argument.partition("=")
        if option:
            expanded.append(_expand(option, argument))
        elif equals and head in _FILE_OPTIONS:
            expanded.append(f"{head}={_expand(head, value)}")
        else:
            expanded.append(argument)
        option = argument if not option and argument in _FILE_OPTIONS else ""
    return expanded


def _expand(option: str, value: str) -> str:
    if value.lstrip().startswith("{"):  # JSON typed on the command line
        return value
    try:
        path = find_recipe(value)
    except UsageError as error:
        if option in _ALWAYS_FILES:
            raise UsageError(f"{option} {error}") from error
        return value  # --model and --data also take a class
    (check_recipe if option in ("-c", "--config") else read_settings)(path)
    return str(path)


def spell_out_classes(arguments: Sequence[str]) -> list[str]:
    """`--model.optimizer SGD --model.optimizer.lr 0.5` with `{"class_path": "torch.optim.SGD"}`, which the key joins.

    jsonargparse does so itself for arguments that are classes only; where a string is allowed too, as for ours, the key
    would replace it.
    """
    spelled = list(arguments)
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        place = index if equals else index + 1
        if not option.startswith("--model.") or place >= len(arguments):
            continue
        path = _class_path(option.rsplit(".", 1)[-1], value if equals else arguments[place])
        if path is not None and any(later.startswith(f"{option}.") for later in arguments[place + 1 :]):
            spelled[place] = (f"{option}=" if equals else "") + json.dumps({"class_path": path})
    return spelled


def _class_path(name: str, value: str) -> str | None:
    """The dotted path that `value` is, or that the argument `name` of our tasks knows by it; None where it is none."""
    if "." in value:
        return value if _DOTTED.fullmatch(value) and not Path(value).exists() else None
    try:
        known = mechanism_class(value) if name in _MECHANISMS else import_object(value, _CLASSES[name])
        return import_path(known)
    except (KeyError, ValueError, TypeError):
        return None


def argument_refusal(error: Exception, options: Iterable[str]) -> UsageError:
    """The parser's error as one of ours; `options` are those that the command knows, such as `--trainer.max_steps`."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines()]
    kept = " ".join(line.removeprefix("- ") for line in lines if not _NOISE.match(line))
    hint = _hint(text, options)
    return UsageError((kept or " ".join(lines)) + (f".{hint}" if hint else ""))


def _hint(text: str, options: Iterable[str]) -> str:
    """A question that offers the nearest names; empty where there is none."""
    if unknown := _UNKNOWN.match(text):
        return did_you_mean(unknown[1], options)
    if (no_path := _NO_PATH.search(text)) and (section := re.match(r'Parser key "(data|model)":', text)):
        package = import_module(_PACKAGES[section[1]])
        near = did_you_mean(no_path[1], [name for name in dir(package) if name[0].isupper()])
        return near.replace(" '", f" '{package.__name__}.")
    if no_option := _NO_OPTION.search(text):
        return did_you_mean(no_option[2], inspect.signature(import_object(no_option[1])).parameters)
    return ""
