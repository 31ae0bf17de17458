"""What follows `attnswap fit`: names of classes are spelled out, and refusals name what was meant."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

import lightning_tasks.models as own_models
from attention_modules.mechanism import did_you_mean, mechanism_class
from lightning_tasks.bounded_yaml import BoundedLoader
from lightning_tasks.errors import UsageError
from lightning_tasks.training.hparams import import_object, import_path
from lightning_tasks.working_folder import shadow_note

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CLASSES = {"model": own_models, "optimizer": torch.optim, "scheduler": torch.optim.lr_scheduler}
_MECHANISMS = ("attention", "other_attention")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)':\s*Option '([^']+)' is not accepted")
# What jsonargparse says of each alternative of a type, and again of the value.
_NOISE = re.compile(
    r"(- )?Does not validate against any|Subtypes: |Errors:|- Expected a <class 'NoneType'>|- Expected a path but"
    r"|Given value|$"
)
_PACKAGES = {"data": "attnswap.datamodules", "model": "lightning_tasks"}


class RecipeParser(LightningArgumentParser):
    """Lightning's parser, which passes over the section `variants` of a recipe: names choose among them."""

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        """Parse the text of a configuration file, without its variants."""
        return super().parse_string(without_variants(content), *args, **kwargs)


def without_variants(text: str) -> str:
    """The text of a YAML file without its section `variants`; every other value as it is written."""
    if "variants" not in text:
        return text
    node = yaml.compose(text, Loader=BoundedLoader)
    if not isinstance(node, yaml.MappingNode):
        return text
    node.value = [(key, value) for key, value in node.value if key.value != "variants"]
    return yaml.serialize(node)


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
    hint = _hint(text, options) + shadow_note(text)
    return UsageError((kept or " ".join(lines)) + (f".{hint}" if hint[:1] == " " else hint))


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
