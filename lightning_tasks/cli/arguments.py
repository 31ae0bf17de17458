"""What follows `attnswap fit`: names of classes are spelled out, and refusals name what was meant."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_warn

from attention_modules.mechanism import did_you_mean, mechanism_class, nearest
from lightning_tasks.bounded_yaml import BoundedLoader
from lightning_tasks.errors import UsageError
from lightning_tasks.training.hparams import import_object, import_path
from lightning_tasks.working_folder import shadow_note

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_CLASSES = {  # imported when one is named: timm behind the first takes a second
    "model": "lightning_tasks.models",
    "optimizer": "torch.optim",
    "scheduler": "torch.optim.lr_scheduler",
}
_MECHANISMS = ("mechanism", "other_attention")
_ATTENTION = re.compile(r"^--model\.attention(?:_(options|layers))?(?=[.=]|$)")  # options that say what they are of
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\w+)")
_NO_OPTION = re.compile(r"class_path '([\w.]+)':\s*Option '([^']+)' is not accepted")
# What jsonargparse says of each alternative of a type, and again of the value.
_NOISE = re.compile(
    r"(- )?Does not validate against any|Subtypes: |Errors:|- Expected a <class 'NoneType'>|- Expected a path but"
    r"|Given value|$"
)
_OF_OPTIMIZERS = frozenset(
    name for kind in (torch.optim.SGD, torch.optim.AdamW) for name in inspect.signature(kind).parameters
)
_CALLBACKS = "--trainer.callbacks"
_LAST_CALLBACK = (
    "An option of --trainer.callbacks reaches the last callback of the list alone; change others in a configuration "
    "file, or add one with --trainer.callbacks+=CLASS before its options"
)
_NO_LOGGER = (
    "An option such as --trainer.logger.save_dir changes the logger that a configuration names, and this one names "
    "none. Without one a run has a CSVLogger, in runs/RECIPE/version_N: --trainer.default_root_dir DIR puts it into "
    "DIR/RECIPE/version_N. To set all its arguments, name it first: --trainer.logger "
    "lightning.pytorch.loggers.CSVLogger --trainer.logger.save_dir DIR --trainer.logger.name NAME"
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
    arguments = [_ATTENTION.sub(lambda found: f"--model.{found[1] or 'mechanism'}", each) for each in arguments]
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
        return value if _DOTTED.fullmatch(value) and not os.path.exists(value) else None
    try:
        known = mechanism_class(value) if name in _MECHANISMS else import_object(value, import_module(_CLASSES[name]))
        return import_path(known)
    except (KeyError, ValueError, TypeError):
        return None


def argument_refusal(error: Exception, options: Iterable[str]) -> UsageError:
    """The parser's error as one of ours; `options` are those that the command knows, such as `--trainer.max_steps`."""
    text = str(error)
    if "lightning.pytorch.loggers.Logger is abstract" in text:
        return UsageError(_NO_LOGGER)
    lines = [line.strip() for line in text.splitlines()]
    kept = " ".join(line.removeprefix("- ") for line in lines if not _NOISE.match(line))
    hint = _hint(text, options) + shadow_note(text)
    return UsageError((kept or " ".join(lines)) + (f".{hint}" if hint[:1] == " " else hint))


def _hint(text: str, options: Iterable[str]) -> str:
    """A question that offers the nearest names, or where an option belongs; empty where there is none."""
    if unknown := _UNKNOWN.match(text):
        whole = [option for option in options if option.startswith(unknown[1])]  # what it may abbreviate
        return did_you_mean(unknown[1], options) if not whole else f" Did you mean {' or '.join(map(repr, whole[:3]))}?"
    if (no_path := _NO_PATH.search(text)) and (section := re.match(r'Parser key "(data|model)":', text)):
        return _known_classes(section[1], no_path[1])
    if not (no_option := _NO_OPTION.search(text)):
        return ""
    if text.startswith(f'Parser key "{_CALLBACKS[2:]}"'):
        return f" {_LAST_CALLBACK}"
    parameters = inspect.signature(import_object(no_option[1])).parameters
    if no_option[2] in _OF_OPTIMIZERS and "optimizer" in parameters:
        return f" It belongs to the optimizer: --model.optimizer.{no_option[2]}"
    return did_you_mean(no_option[2], parameters)


def _known_classes(section: str, name: str) -> str:
    """The classes that `--data` or `--model` takes by these packages, the nearest to `name` first."""
    package = import_module(_PACKAGES[section])
    base = LightningDataModule if section == "data" else LightningModule
    known = [
        each
        for each, found in ((each, getattr(package, each)) for each in dir(package) if each[0].isupper())
        if isinstance(found, type) and issubclass(found, base) and not _is_abstract(found)
    ]
    first, *others = nearest(name, known, len(known), 0.0, beginnings=True)
    return (
        f" Did you mean '{package.__name__}.{first}'? Others there: {', '.join(others)}; a class of your own by its "
        "import path"
    )


def _is_abstract(found: type) -> bool:  # Lightning's classes are no ABC, which would know
    return any(getattr(getattr(found, name, None), "__isabstractmethod__", False) for name in dir(found))


def warn_of_last_callback(arguments: Sequence[str], callbacks: Any) -> None:
    """Warn where the command line changes the callbacks of a file, of which it reaches the last one alone.

    Args:
        arguments: of the command line.
        callbacks: the list that comes of them.
    """
    options = [argument.partition("=")[0] for argument in arguments]
    given = next((place for place, option in enumerate(options) if option.rstrip("+") == _CALLBACKS), len(options))
    changed = [option for option in options[:given] if option.startswith(f"{_CALLBACKS}.")]
    if changed and isinstance(callbacks, list) and len(callbacks) > 1:
        last = callbacks[-1]["class_path"].rpartition(".")[2]
        rank_zero_warn(f"{changed[0]} changes {last}, the last of {len(callbacks)} callbacks. {_LAST_CALLBACK}")
