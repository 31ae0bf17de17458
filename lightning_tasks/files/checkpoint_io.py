"""Checkpoint files: written whole or not at all, and checked byte by byte when they are read."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities import rank_zero_warn

SHARDED = "meta.pt"
"""What Lightning puts into the folder of a sharded checkpoint: all but its tensors."""


class UnwrittenCheckpoint(OSError):
    """A checkpoint that the disk did not take; the file of that name, if there was one, is as it was before."""


def refuse_damaged(path: str | Path) -> None:
    """Compare every checksum in a file that torch wrote with its bytes; torch itself reads over them.

    Files in torch's older format, which is no zip archive, have none.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is a URL or a folder, or its bytes are not those that were written.
    """
    if "://" in str(path):
        raise ValueError(f"{path} is a URL, and checkpoints are read from files; download it and give the file's path")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file; give the path of a .ckpt file")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder; give the path of a .ckpt file")
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # a header with a wrong bit can fail in any way
        broken = f"its table of contents ({type(error).__name__})"
    if broken is not None:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is damaged, the checksum of {broken} differs from what was "
            "written; give another checkpoint of the run, or copy the file again"
        )


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is the folder of a sharded checkpoint, which only the strategy that wrote it can read."""
    return Path(path, SHARDED).is_file()


def _is_only_sharded(path: str | Path) -> bool:
    """Whether a folder, which no link or `..` leads to, has the files of a sharded checkpoint alone."""
    if Path(path).is_symlink() or ".." in Path(path).parts or not is_sharded(path):
        return False
    return all(name in (SHARDED, ".metadata") or name.endswith(".distcp") for name in os.listdir(path))


def _folder(path: str | Path) -> str:
    return str(path).rpartition("/")[0] if "://" in str(path) else os.path.realpath(os.path.dirname(path))


class CheckedCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there once it is on the disk; checks it on reading.

    A run that is killed while it writes, and a disk that is full, leave the previous file of that name as it was.
    For any trainer: ``Trainer(plugins=[CheckedCheckpointIO()])``; the command uses it by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folders: set[str] = set()  # of this run's checkpoints
        self._suffixes: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file, on any file system of this machine.

        Raises:
            UnwrittenCheckpoint: the disk does not take it; the text says why.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            self._remember(checkpoint, path)
            return
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            self._remember(checkpoint, path)
        except (OSError, RuntimeError) as error:  # torch turns some errors of the file into its own
            cause = error if isinstance(error, OSError) else error.__context__
            partial.unlink(missing_ok=True)
            if not isinstance(cause, OSError):
                raise
            text = f"the checkpoint {target} could not be written ({cause.strerror or cause})"
            raise UnwrittenCheckpoint(text) from error

    def _remember(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Note where this run keeps its checkpoints: names with a slash in them lie below a callback's folder."""
        states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
        own = {os.path.realpath(state["dirpath"]) for state in states if state.get("dirpath")}
        self._folders |= {_folder(path), *own}
        self._suffixes.add(Path(path).suffix)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, place: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the file once its checksums hold.

        Raises:
            FileNotFoundError, ValueError: as :func:`refuse_damaged`.
        """
        refuse_damaged(path)
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint that is no longer among the best; anything else stays, with a warning.

        What Lightning removes after it resumed is named by the checkpoint, a file, and it removes folders with all that
        is in them. So a file must lie in a folder of this run's checkpoints and be named as these are, and a folder
        must hold a sharded checkpoint and nothing else.
        """
        url = "://" in str(path)
        if not url and not os.path.exists(path):
            return
        if _folder(path) in self._folders if url else self._is_own_file(path) or _is_only_sharded(path):
            super().remove_checkpoint(path)
        else:
            rank_zero_warn(f"{path} is not removed: it is no checkpoint that this run can have written")

    def _is_own_file(self, path: str | Path) -> bool:
        place = Path(path).resolve()
        inside = any(place.is_relative_to(folder) for folder in self._folders)
        return inside and place.is_file() and Path(path).suffix == place.suffix and place.suffix in self._suffixes
