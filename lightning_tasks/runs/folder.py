"""Folders that a command writes into: one per run, and that of --output."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from lightning_tasks.errors import UsageError

RUNS = Path("runs")
LOCK = ".attnswap.lock"


def claim_run_folder(recipe: str, root: Path) -> Path:
    """Make and return the first free `root/recipe/version_N`; two jobs that start at once get two folders.

    Processes other than rank zero write nothing: they make no folder.
    """
    parent, number = root / recipe, 0
    if getattr(rank_zero_only, "rank", 0) != 0:
        return parent / "version_0"
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            (parent / f"version_{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / f"version_{number}"


def release_run_folder(folder: Path, kept: Path) -> None:
    """Remove the folder of a run that could not begin, and those above it that are below `kept`, as far as empty."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    for path in (folder, *folder.parents):
        if kept not in path.parents:
            return
        try:
            path.rmdir()
        except OSError:
            return


def existing_part(path: Path) -> Path:
    """The longest part of a path that is there."""
    return next((part for part in (path, *path.parents) if part.exists()), path)


def make_output(folder: Path) -> None:
    """Make ``--output``, with the folders above it.

    Raises:
        UsageError: it, or a part of its path, is a file, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(part for part in (folder, *folder.parents) if part.exists())
        raise UsageError(f"--output {folder}: {file} is a file; give a folder") from None
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror}; give another folder") from error


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make ``--output``, with the folders above it, and hold it: another command is refused there until the end.

    The lock of a process that was killed is free.

    Raises:
        UsageError: as :func:`make_output`; or it cannot be locked, or another process holds it.
    """
    make_output(folder)
    path = folder / LOCK
    if os.path.lexists(path):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise UsageError(f"--output {folder}: {path} is no plain file, or a link to one; remove it")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"--output {folder}: another attnswap command is at work there; wait for it, or give another folder"
        ) from None
    except (OSError, NotImplementedError) as error:  # not to be written to, or a file system without locks
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--output {folder}: {path} cannot be locked ({reason}); give another folder") from error
    try:
        yield
    finally:
        lock.release()
