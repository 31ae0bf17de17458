"""`--ckpt_path last`: the newest checkpoint of the same configuration among a recipe's runs that can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_tasks.cli.loggers import runs_folder
from lightning_tasks.cli.save_config import CONFIGURATION, ENVIRONMENT, JOB, THIS_JOB, plain_of
from lightning_tasks.errors import UsageError
from lightning_tasks.files.checkpoint_io import SHARDED, is_sharded
from lightning_tasks.files.weights import read_checkpoint
from lightning_tasks.recipes import read_settings
from lightning_tasks.runs.folder import RUNS
from lightning_tasks.training.hparams import join_arguments

_NO_SETTINGS = {"num_workers", "download"}  # of data: they change how it is read, not what is read
_MOST_NAMED = 3


def last_checkpoint(section: Any, model: Mapping[str, Any], recipe: str, resumes: bool) -> Path:
    """The newest readable checkpoint among those that earlier runs of a recipe wrote with the same configuration.

    Where none has the same model, the newest with the same data and seed counts: the checkpoint may bring what the
    configuration leaves open. Without a fit to resume, other data may be meant, and the newest of all counts last.

    Args:
        section: the configuration of the command.
        model: what was given of the model.
        recipe: the name of the recipe, which its runs' folder has.
        resumes: whether a fit goes on from it, which takes more than the weights.

    Raises:
        UsageError: there is none, or those are of other data or another seed; the text names the folders, or what
            differs.
    """
    patterns, found = _checkpoints(section.trainer, recipe)
    here = plain_of({key: section.get(key) for key in ("data", "seed_everything")})
    if here["seed_everything"] is True:  # any seed
        del here["seed_everything"]
    own = join_arguments(plain_of({"model": model}))
    saved = {path: _configuration(path) for path in found}
    others = {path: _differences(here, saved[path]) for path in found}
    alike = [path for path in found if not others[path]]
    same = [path for path in alike if not _differences(own, saved[path])]
    rest = [] if resumes else found
    for path in dict.fromkeys([*same, *alike, *rest]):
        fault = _fault(path, resumes)
        if fault is None:
            if newer := found[: found.index(path)]:
                _say_left_out([each for each in newer if others[each] or (path in same and each not in same)], path)
            return path
        rank_zero_warn(f"--ckpt_path last leaves out {path.name}, and takes an older one: {fault}")
    looked = ", ".join(str(folder / pattern) for folder, pattern in patterns)
    if found and not alike:
        said = "; ".join(others[found[0]][:_MOST_NAMED])
        raise UsageError(
            f"--ckpt_path last: the newest checkpoint in {looked} is {found[0]}, of another configuration: {said}; "
            "give the path of a file to go on from it all the same, or leave --ckpt_path out to start anew"
        )
    none = f"none of {len(found)} checkpoints can be resumed" if found else "there is no checkpoint"
    raise UsageError(f"--ckpt_path last: {none} in {looked}; leave it out to start anew, or give the path of a file")


def checkpoint_of_job(section: Any, recipe: str) -> Path | None:
    """The newest checkpoint that the queued job of this fit wrote before it was queued again; None where it has none.

    Args:
        section: the configuration of the command.
        recipe: the name of the recipe.
    """
    job = os.environ.get(THIS_JOB)
    for path in _checkpoints(section.trainer, recipe)[1] if job else ():
        content = _content(path)
        if not content:
            rank_zero_warn(f"this job looks for its own checkpoint, and leaves out {path}, which cannot be read")
        elif content.get(JOB) == job and _fault(path, resumes=True) is None:
            return path
    return None


def _checkpoints(trainer: Any, recipe: str) -> tuple[dict[tuple[Path, str], None], list[Path]]:
    """Where the checkpoints of a recipe's runs are, and which there are, the newest first."""
    patterns = dict.fromkeys(_patterns(trainer, recipe))
    # A link may outlive its file: save_last="link" makes one to a checkpoint that is removed later.
    found = [path for folder, pattern in patterns for path in folder.glob(pattern) if path.exists()]
    return patterns, sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _say_left_out(newer: list[Path], taken: Path) -> None:
    if newer:
        names = ", ".join(map(str, newer[:_MOST_NAMED])) + (", ..." if newer[_MOST_NAMED:] else "")
        rank_zero_warn(f"--ckpt_path last takes {taken}: newer ones are of another configuration ({names})")


def _patterns(trainer: Any, recipe: str) -> Iterator[tuple[Path, str]]:
    """Folders and patterns of the files that the checkpoint callbacks of such runs write."""
    for folder in _own_folders(trainer.callbacks):
        yield folder, "*.ckpt"
    root = Path(trainer.default_root_dir or RUNS)
    if trainer.logger is False:
        yield Path(trainer.default_root_dir or ".") / "checkpoints", "*.ckpt"
    else:
        yield runs_folder(trainer.logger, recipe, root), "*/checkpoints/*.ckpt"


def _own_folders(callbacks: Any) -> Iterable[Path]:
    """The folders that the configuration of the callbacks gives to those that write checkpoints."""
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    arguments = [callback.get("init_args") or {} for callback in given if callback is not None]
    return [Path(each["dirpath"]) for each in arguments if each.get("dirpath")]


def _configuration(path: Path) -> dict[str, Any]:
    """Model, data and seed of the run that wrote a checkpoint; nothing where neither file nor folder tells.

    The file comes first: its folder may hold a `config.yaml` of the user's own, or one of a later run.
    """
    content, run = _content(path), path.parent.parent
    try:
        if CONFIGURATION in content:
            found = json.loads(content[CONFIGURATION])
            return found if isinstance(found, dict) else {}
        if content and path.parent.name == "checkpoints" and (run / ENVIRONMENT).is_file():
            return read_settings(run / "config.yaml")
    except Exception:  # a damaged file fails in any way, and is left out by its fault
        return {}
    return {}


def _content(path: Path) -> Mapping[str, Any]:
    """What a checkpoint holds, its tensors unread; nothing where it cannot be read."""
    file = path / SHARDED if is_sharded(path) else path
    try:
        # Checksums are compared for what is taken; without them no tensor is read.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except Exception:  # a damaged file fails in any way, and is left out by its fault
        return {}
    return content if isinstance(content, Mapping) else {}


def _differences(here: Any, there: Any, key: str = "") -> list[str]:
    """What two configurations say otherwise of the same keys."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        if "class_path" in here and here["class_path"] != there.get("class_path", here["class_path"]):
            return [f"{key} is {there['class_path']} there and {here['class_path']} here"]
        names = [name for name in here if name in there and name not in _NO_SETTINGS]
        return [text for name in names for text in _differences(here[name], there[name], f"{key}.{name}".lstrip("."))]
    return [] if here == there else [f"{key} is {there!r} there and {here!r} here"]


def _fault(path: Path, resumes: bool) -> str | None:
    """Why a checkpoint cannot be taken, None where it can."""
    if is_sharded(path):
        return None
    try:
        content = read_checkpoint(path)
    except (OSError, ValueError) as error:
        return str(error)
    if resumes and "optimizer_states" not in content:
        return "it holds weights only"
    return None
