"""What wrote the tables of an analysis: the command, how long it took, and where it ran, in `made_by.json`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join
from typing import Any

from lightning_tasks.errors import UsageError
from lightning_tasks.json_values import list_of, number_of, text_of
from lightning_tasks.runs.environment import Environment, parse_environment, this_environment
from lightning_tasks.runs.safe_files import MOST_SETTINGS_BYTES, refuse_foreign, written_whole

MADE_BY = "made_by.json"


@dataclass(frozen=True)
class MadeBy:
    """One run of a command.

    Args:
        command: as a shell takes it.
        seconds: how long it took, until it was interrupted where it was.
        environment: where it ran.
    """

    command: str
    seconds: float
    environment: Environment


class Recording:
    """The run of a command that writes tables, from its beginning on.

    Args:
        folder: that of the tables.
        command: the words before the arguments.
        arguments: those of the command.
        anew: whether the tables are written anew; otherwise what earlier runs kept stays, and this one is added.

    Raises:
        UsageError: what is there of earlier runs is damaged.
    """

    def __init__(self, folder: Path, command: str, arguments: Sequence[str], anew: bool = True) -> None:
        self._folder = folder
        self._command = join([*command.split(), *arguments])
        self._earlier = [] if anew else read_made_by(folder)
        self._started = time.monotonic()

    def write(self) -> None:
        """Keep it beside the tables, once they are written."""
        this = MadeBy(self._command, round(time.monotonic() - self._started, 1), this_environment())
        with written_whole(self._folder / MADE_BY) as partial:
            partial.write_text(json.dumps([asdict(each) for each in (*self._earlier, this)], indent=1), "utf-8")


def read_made_by(folder: Path) -> list[MadeBy]:
    """The runs that wrote the tables of a folder, the oldest first; none where none was kept.

    Raises:
        UsageError: the file is damaged, too large, or a link out of the folder.
    """
    path = folder / MADE_BY
    if not os.path.lexists(path):
        return []
    refuse_foreign(path, folder, MOST_SETTINGS_BYTES)
    try:
        return [_parsed(each) for each in list_of(json.loads(path.read_text(encoding="utf-8")), dict)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error}); delete it") from error


def _parsed(given: dict[str, Any]) -> MadeBy:
    return MadeBy(text_of(given["command"]), number_of(given["seconds"]), parse_environment(given["environment"]))
