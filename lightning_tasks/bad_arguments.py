"""What the parser refuses, in one line, with the nearest name that exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import ModuleType

import datamodules
import lightning_tasks
from attention_modules.mechanism import did_you_mean
from lightning_tasks.errors import UsageError
from lightning_tasks.training.hparams import import_object

_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)':\s*Option '([^']+)' is not accepted")
# What jsonargparse says of each alternative of a type, and again of the value.
_NOISE = re.compile(
    r"Does not validate against any|Subtypes: |Errors:|- Expected a <class 'NoneType'>|- Expected a path but"
    r"|Given value|$"
)
_PACKAGES: dict[str, ModuleType] = {"data": datamodules, "model": lightning_tasks}


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
        package = _PACKAGES[section[1]]
        near = did_you_mean(no_path[1], [name for name in package.__all__ if name[0].isupper()])
        return near.replace(" '", f" '{package.__name__}.")
    if no_option := _NO_OPTION.search(text):
        return did_you_mean(no_option[2], inspect.signature(import_object(no_option[1])).parameters)
    return ""
