"""The folder that a command writes into."""

from __future__ import annotations

from pathlib import Path

from lightning_tasks.errors import UsageError


def make_output_folder(folder: Path) -> None:
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
