"""One cell of a comparison: one configuration, one seed, one folder, one result that is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lightning_tasks.errors import PEER_ENDED, UsageError
from lightning_tasks.files.sources import Sources, changed_sources, sources_of, value_of
from lightning_tasks.runs.safe_files import read_result, refuse_foreign

RESULT = "result.json"
CHECKPOINT = "last.ckpt"
_NEEDED = ("fingerprint", "initial_weights", "training_data", "rows")
_MOST_BYTES = 200  # of the 255 that file systems take


@dataclass(frozen=True)
class Cell:
    """A configuration (file and command-line overrides) with a seed; its files are under `output`/`place`.

    With `test` the fitted model is tested too, and what the test logs belongs to the result; with `keep` the state at
    the end of the fit is kept, which is no setting: a result is the same with it and without. With `any_code` a result
    counts whatever code and files it was made with. `processes` is of how many its trainer makes use, a device each.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    seed: int
    output: str
    test: bool = False
    comparison: str = ""
    place: str = "cells"
    keep: bool = False
    any_code: bool = False
    processes: int = 1

    @property
    def label(self) -> str:
        """Name and seed for messages."""
        return f"{self.name} seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where the files of this cell are."""
        return Path(self.output) / self.place / folder_name(self.name) / f"seed_{self.seed}"

    @property
    def lease(self) -> Path:
        """The file of who runs it."""
        return Path(self.output) / "leases" / self.place / self.folder.parent.name / self.folder.name

    @property
    def log(self) -> Path:
        """What the cell's run printed."""
        return self.folder / "log.txt"

    @property
    def checkpoint(self) -> Path:
        """The state at the end of its fit, where that was kept."""
        return self.folder / CHECKPOINT

    @property
    def arguments(self) -> list[str]:
        """The command line of this cell, folders apart."""
        fixed = ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
        fixed += ["--trainer.enable_model_summary=false"]
        return ["fit", "--config", self.config, *fixed, *self.overrides, f"--seed_everything={self.seed}"]

    @property
    def fingerprint(self) -> str:
        """Changes with whatever the cell was asked to do, so that a stale result is not taken for this cell's.

        Of the configuration its content counts, wherever the file lies and whatever its comments say; of its variants,
        what this cell overrides. So it does of files that overrides name, as `trainer=my_trainer.yaml`.
        """
        asked = [
            _content(Path(self.config).read_text(encoding="utf-8")),
            self.arguments[3:],
            *(["test"] if self.test else []),
            *([files] if (files := _named_files(self.overrides)) else []),
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def sources(self) -> Sources:
        """The code and the files that its configuration names, as they are now."""
        values = [value_of(each.partition("=")[2]) for each in self.overrides]
        config = Path(self.config)
        return sources_of([_content(config.read_text(encoding="utf-8")), *values], config.parent)

    def changed(self) -> list[str]:
        """What a result of these settings was made with and is not as it was; empty where there is none.

        A result of an earlier version does not say what it was made with: nothing counts as changed.
        """
        recorded = self.recorded_sources()
        return [] if recorded is None else changed_sources(recorded, self.sources)

    def recorded_sources(self) -> Sources | None:
        """What a result of these settings was made with; None where there is none, or it is of an earlier version."""
        return self.result().get("sources") if self._has_result() else None

    def refuse_links(self) -> None:
        """Check that no folder of this cell is a symbolic link, so that nothing elsewhere is deleted or written.

        Raises:
            UsageError: one is.
        """
        for folder in (self.folder, *self.folder.parents[:2], *self.lease.parents[:3]):
            if folder.is_symlink():
                raise UsageError(
                    f"{folder} is a symbolic link, and cells that are not finished are deleted: remove the link, or "
                    "give another --output"
                )

    def clear(self) -> None:
        """Make the folder anew, without what an interrupted run of this cell left.

        Raises:
            UsageError: as :meth:`refuse_links`.
        """
        self.refuse_links()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def is_finished(self) -> bool:
        """Whether a result of exactly this cell is there."""
        return self._has_result() and (self.any_code or not self.changed())

    def _has_result(self) -> bool:
        return (self.folder / RESULT).is_file() and self.result()["fingerprint"] == self.fingerprint

    def result(self) -> dict[str, Any]:
        """The result of a finished cell.

        Raises:
            UsageError: the file is damaged, or not in the folder of the comparison.
        """
        path = self.folder / RESULT
        refuse_foreign(path, Path(self.output))
        return read_result(path, _NEEDED)


@lru_cache(maxsize=64)  # cells of a comparison are many, and their recipes few
def _content(text: str) -> Any:
    content = yaml.safe_load(text)
    content.pop("variants", None)
    return content


def _named_files(overrides: Sequence[str]) -> list[Any]:
    """The content of each YAML or JSON file that an override names, which jsonargparse reads in its place."""
    values = [each.partition("=")[2] for each in overrides]
    paths = [Path(value) for value in values if value.endswith((".yaml", ".yml", ".json")) and os.path.isfile(value)]
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]


def folder_name(name: str) -> str:
    """A name as one part of a path: with _ for other signs, and a digest for the end of one that is too long."""
    slug = re.sub(r"[^\w.=+-]+", "_", name)
    slug = slug if slug.strip(".") else "_" * max(1, len(slug))  # no path leads up or nowhere
    if len(slug.encode()) <= _MOST_BYTES:
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return slug.encode()[: _MOST_BYTES - 9].decode(errors="ignore") + f"_{digest}"


def last_error(text: str) -> str:
    """The error that a log ends with, in one line: from its last "error:" on, else its last line; "" where none is.

    Where that says that another process ended, it is the one before, which that process said.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if re.match(r"(\S+: )?error:|[\w.]*(Error|Exception)\b", line)]
    end = len(lines)
    while len(starts) > 1 and PEER_ENDED in lines[starts[-1]]:
        end = starts.pop()
    return " ".join(lines[starts[-1] if starts else -1 : end])
