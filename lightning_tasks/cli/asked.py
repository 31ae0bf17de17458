"""What a command line asks for, as far as it can be read and checked before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.recipes.variants import find_variant, full_name

_RECIPE_OPTIONS = ("-c", "--config")
_ALWAYS_FILES = (*_RECIPE_OPTIONS, "--trainer")
_FILE_OPTIONS = (*_ALWAYS_FILES, "--model", "--data")
_CHECKPOINT_OPTIONS = ("--ckpt_path", "--init_from")
_VALUES = {
    "-c": "RECIPE",
    "--config": "RECIPE",
    "--ckpt_path": "CHECKPOINT",
    "--init_from": "FILE",
    "--images": "FOLDER",
}
CKPT_WORDS = ("best", "last", "hpc", "registry")
"""What stands for a checkpoint without being a path; the command resolves `last`, and Lightning the others."""
_NOTHING_TO_RUN = """\
`attnswap {command}` needs to know what to run; give one of
a recipe: attnswap {command} quickstart/classification (`attnswap recipes` lists them all)
a file of yours: attnswap {command} --config my.yaml
classes, installed or of this folder: attnswap {command} {classes}"""
_CLASSES = {
    "show-batch": "--data CLASS",
    "predict": "--model CLASS --data CLASS --ckpt_path CHECKPOINT\n"
    "a checkpoint and images: attnswap predict --ckpt_path CHECKPOINT --images FOLDER",
}


def named_recipe(arguments: Sequence[str]) -> list[str]:
    """The command line with `--config` before a recipe that follows the command itself: `fit my.yaml`."""
    command, *rest = arguments
    if rest and not rest[0].startswith("-"):
        return [command, "--config", *rest]
    return [command, *rest]


def check_asked(arguments: Sequence[str]) -> None:
    """Check that a command line says what to run, and that its recipes and checkpoints exist.

    Raises:
        UsageError: it does not, or one does not.
    """
    command, *rest = arguments
    options = [argument.partition("=")[0] for argument in rest]
    asks_for_text = any(each in ("-h", "--help", "--print_config") or each.endswith(".help") for each in options)
    known = (*_RECIPE_OPTIONS, "--model", "--data", "--images")
    if not asks_for_text and not any(each.split(".")[0] in known for each in options):
        classes = _CLASSES.get(command, "--model CLASS --data CLASS")
        raise UsageError(_NOTHING_TO_RUN.format(command=command, classes=classes))
    for option, value in zip(rest, [*rest[1:], "--"], strict=True):
        if option in _VALUES and value.startswith("--"):
            raise UsageError(f"{option} has no value: give {option} {_VALUES[option]}")
    expand_recipe_names(rest)
    for option in _CHECKPOINT_OPTIONS:
        path = value_of(rest, option)
        elsewhere = path is None or path in ("", "null") or path.split(":")[0] in CKPT_WORDS or "://" in path
        if path is not None and not elsewhere and not os.path.exists(path):
            raise UsageError(f"{option} {path}: no such file; give the path of a .ckpt file")


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """The last value of an option on a command line, None where it is not there."""
    value = None
    for place, argument in enumerate(arguments):
        head, equals, behind = argument.partition("=")
        if head == option and (equals or place + 1 < len(arguments)):
            value = behind if equals else arguments[place + 1]
    return value


def expand_recipe_names(arguments: Sequence[str]) -> list[str]:
    """Replace the names of recipes and parts behind --config, --trainer, --model and --data by the paths they mean.

    What a variant changes follows the path of its recipe.

    Raises:
        UsageError: --config or --trainer names nothing that exists.
    """
    expanded: list[str] = []
    option = ""
    for argument in arguments:
        head, equals, value = argument.partition("=")
        if option:
            expanded += _expand(option, argument)
        elif equals and head in _FILE_OPTIONS:
            path, *overrides = _expand(head, value)
            expanded += [f"{head}={path}", *overrides]
        else:
            expanded.append(argument)
        option = argument if not option and argument in _FILE_OPTIONS else ""
    return expanded


def _expand(option: str, value: str) -> list[str]:
    """The path that a name behind an option means, and the arguments that follow it."""
    if value.lstrip().startswith("{"):  # JSON typed on the command line
        return [value]
    try:
        if option in _RECIPE_OPTIONS:
            variant = find_variant(value)
            return [variant.config, *variant.overrides]
        path = find_recipe(value)
    except UsageError as error:
        if option in _ALWAYS_FILES:
            raise UsageError(f"{option} {error}") from error
        return [value]  # --model and --data also take a class
    read_settings(path)
    return [str(path)]


def recipe_of(arguments: Sequence[str]) -> str | None:
    """The full name of the first recipe behind --config, None where there is none, or JSON."""
    for place, argument in enumerate(arguments):
        head, equals, value = argument.partition("=")
        if head in _RECIPE_OPTIONS and (equals or place + 1 < len(arguments)):
            name = value if equals else arguments[place + 1]
            return None if name.lstrip().startswith("{") else full_name(name)
    return None
