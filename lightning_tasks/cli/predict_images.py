"""`attnswap predict --ckpt_path CHECKPOINT --images FOLDER`: the run of the checkpoint says how images are prepared."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tasks.cli.asked import CKPT_WORDS, value_of
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import read_settings

_SECTIONS = ("-c", "--config", "--model", "--data")
_SWAP = "SwapAttention"


def settings_of_run(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]] | None:
    """The configuration of the run whose checkpoint predicts a folder, and its file; None where it is not needed.

    It is not where there is no `--images`, or the command line has a configuration.

    Raises:
        UsageError: there is no such folder, checkpoint or configuration.
    """
    folder, checkpoint = value_of(arguments, "--images"), value_of(arguments, "--ckpt_path")
    if folder is None:
        return None
    if not os.path.isdir(folder):
        raise UsageError(f"--images {folder}: no such folder; give a folder of images")
    if any(argument.partition("=")[0].split(".")[0] in _SECTIONS for argument in arguments):
        return None
    if checkpoint is None or checkpoint in CKPT_WORDS:
        raise UsageError("--images needs --ckpt_path FILE, the checkpoint that predicts (or --config RECIPE with it)")
    if not os.path.exists(checkpoint):
        raise UsageError(f"--ckpt_path {checkpoint}: no such file; give the path of a .ckpt file")
    places = [folder / "config.yaml" for folder in Path(checkpoint).resolve().parents[:2]]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(
            f"--ckpt_path {checkpoint}: the configuration of its run is neither {places[0]} nor {places[1]}; give it, "
            "or the recipe that was trained: --config RECIPE"
        )
    settings = read_settings(found)
    for section in ("model", "data"):
        if not isinstance(settings.get(section), dict) or "class_path" not in settings[section]:
            raise UsageError(
                f"{found} names no class in its section {section!r}; give the recipe that was trained: --config RECIPE"
            )
    return found, settings


def recipe_of_run(arguments: Sequence[str]) -> str | None:
    """What the runs of the checkpoint's recipe are called, where its run says how to predict; else None.

    Raises:
        UsageError: as :func:`settings_of_run`.
    """
    found = settings_of_run(arguments)
    if found is None:
        return None
    from lightning_tasks.runs.folder import RUNS

    place, root = found[0].parent.parent, RUNS.resolve()
    return place.relative_to(root).as_posix() if root in place.parents else place.name


def arguments_of_run(arguments: Sequence[str]) -> list[str]:
    """The command line with the model, data and swaps of that run; raises as :func:`sections_of_run`."""
    command, *rest = arguments
    sections = sections_of_run(arguments).items()
    return [command, *(part for name, section in sections for part in (f"--{name}", json.dumps(section))), *rest]


def sections_of_run(arguments: Sequence[str]) -> dict[str, Any]:
    """The model, data and swaps of that run; the file is data, and names nothing of its own.

    Raises:
        UsageError: as :func:`settings_of_run`.
        ValueError: the file names what a checkpoint may not, see :func:`.check_stored`.
    """
    found = settings_of_run(arguments)
    if found is None:
        return {}
    from lightning_tasks.base import BaseTask
    from lightning_tasks.files.names import allowed_names
    from lightning_tasks.files.stored import check_stored
    from lightning_tasks.training.hparams import import_object

    file, settings = found
    trainer = settings.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
    sections: dict[str, Any] = {
        "model": without_nulls(settings["model"]),
        "data": without_nulls(settings["data"]),
        "trainer.callbacks": [each for each in callbacks if _is_swap(each)] if isinstance(callbacks, list) else [],
    }
    allowed = None if "--trust_checkpoint" in arguments else allowed_names()
    for place, section in zip(("hyper_parameters", "data", "callbacks"), sections.values(), strict=True):
        check_stored(section, allowed, file, place)
    if allowed is not None and issubclass(import_object(sections["model"]["class_path"]), BaseTask):
        del sections["model"]["init_args"]  # the checkpoint has them, of which no text is read anew
    return {name: section for name, section in sections.items() if section}


def without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    """A class and those of its arguments that are set: what was left open, the checkpoint knows or nothing does."""
    arguments = section.get("init_args") or {}
    kept = {name: section[name] for name in ("class_path",) if name in section}
    return {**kept, "init_args": {name: value for name, value in arguments.items() if value is not None}}


def _is_swap(callback: Any) -> bool:
    return isinstance(callback, dict) and str(callback.get("class_path")).rpartition(".")[2] == _SWAP
