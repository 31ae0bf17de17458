"""`--ckpt_path last`: the newest checkpoint of a recipe's runs that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_tasks.checkpoints.files import is_sharded
from lightning_tasks.checkpoints.weights import read_checkpoint
from lightning_tasks.cli.loggers import runs_folder
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import RUNS


def last_checkpoint(trainer: Any, recipe: str, resumes: bool) -> Path:
    """The newest readable checkpoint among those that earlier runs of a recipe wrote.

    Args:
        trainer: the configuration of the trainer.
        recipe: the name of the recipe, which its runs' folder has.
        resumes: whether a fit goes on from it, which takes more than the weights.

    Raises:
        UsageError: there is none; the text names the folders.
    """
    patterns = dict.fromkeys(_patterns(trainer, recipe))
    # A link may outlive its file: save_last="link" makes one to a checkpoint that is removed later.
    found = [path for folder, pattern in patterns for path in folder.glob(pattern) if path.exists()]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True):
        fault = _fault(path, resumes)
        if fault is None:
            return path
        rank_zero_warn(f"--ckpt_path last leaves out {path.name}, and takes an older one: {fault}")
    looked = ", ".join(str(folder / pattern) for folder, pattern in patterns)
    none = f"none of {len(found)} checkpoints can be resumed" if found else "there is no checkpoint"
    raise UsageError(f"--ckpt_path last: {none} in {looked}; leave it out to start anew, or give the path of a file")


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
