"""What wrote the tables of an analysis: the command, how long it took, and where it ran, in `made_by.json`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
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
        began: when, in UTC.
        seconds: from the beginning of the command until it last wrote its tables.
        environment: where it ran.
    """

    command: str
    began: str
    seconds: float
    environment: Environment


class Recording:
    """A run of a command that writes tables. Its time begins here, and its code is that of now.

    Args:
        command: the words before the arguments.
        arguments: those of the command.
    """

    def __init__(self, command: str, arguments: Sequence[str]) -> None:
        text = join([*command.split(), *arguments])
        text = text.encode("utf-8", "backslashreplace").decode()  # a path may be of other bytes
        self._run = MadeBy(text, datetime.now(timezone.utc).isoformat(), 0.0, this_environment())
        self._started = time.monotonic()

    def write(self, folder: Path, anew: bool = False) -> None:
        """Keep this run in the folder of its tables, each time that they are written.

        Args:
            folder: that of the tables.
            anew: whether nothing of earlier runs is left there; otherwise they stay in the list.

        Raises:
            UsageError: what is there of earlier runs is damaged.
        """
        this = replace(self._run, seconds=round(time.monotonic() - self._started, 1))
        others = [] if anew else [each for each in read_made_by(folder) if each.began != this.began]
        with written_whole(folder / MADE_BY) as partial:
            partial.write_text(json.dumps([asdict(each) for each in (*others, this)], indent=1), "utf-8")


def read_made_by(folder: Path) -> list[MadeBy]:
    """The runs that wrote tables of a folder, the oldest first, and which later ones may have replaced.

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
    seconds = number_of(given["seconds"])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds is {seconds}")
    texts = text_of(given["command"]), text_of(given["began"])
    return MadeBy(*texts, seconds, parse_environment(given["environment"]))
