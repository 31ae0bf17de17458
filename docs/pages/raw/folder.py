"""The folder of a page's raw files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from docs.pages.errors import PageError
from docs.pages.raw.comparison import COMPARISON, RESULTS, Comparison
from docs.pages.raw.reading import read_comparison, read_results
from docs.pages.raw.tables import Record, existing, json_of, read_csv, read_records
from lightning_tasks.compare.choice import Choice, parse_choice
from lightning_tasks.runs.divergence import with_stops

Kept = TypeVar("Kept")


class Raw:
    """The folder of a page's raw files; each is read once."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root = root
        self.folder = root / folder
        self._read: dict[Any, Any] = {}

    def comparison(self, place: str, recipe: str) -> Comparison:
        """The comparison in a folder; `recipe` says what was asked where no `comparison.json` does.

        A recipe that is not shipped is a path from the root of the repository.

        Raises:
            PageError: there is no table.
        """
        file = self.root / recipe
        name = str(file) if file.is_file() else recipe
        return self.once(("comparison", place, recipe), lambda: read_comparison(self.folder / place, name))

    def with_earlier(self, found: Comparison, place: str = "") -> tuple[Comparison, Comparison]:
        """The same of the seeds that ran before, of which earlier.csv keeps some metrics, and of all seeds together.

        Args:
            found: the comparison.
            place: its folder, where earlier.csv is too.

        Raises:
            PageError: there is no such file, it is damaged, or a seed is in both.
        """
        path = self.folder / place / "earlier.csv"
        earlier = replace(found, rows=with_stops(read_results(path)), cells=(), images=())
        if twice := {*earlier.seeds} & {*found.seeds}:
            raise PageError(f"{path} has seed {min(twice)}, which is one of {RESULTS} too")
        return earlier, replace(earlier, rows=[*earlier.rows, *found.rows])

    def choices(self, place: str) -> list[Choice]:
        """What was chosen in a folder whose comparison went no further.

        Raises:
            PageError: there is no `comparison.json`, or it is damaged.
        """
        path = existing(self.folder / place / COMPARISON)
        try:
            return [parse_choice(each) for each in json_of(path)["choices"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise PageError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    def rows(self, name: str, folder: Path | None = None) -> list[dict[str, str]]:
        """The rows of a CSV file.

        Raises:
            PageError: there is no such file.
        """
        return self.once(("rows", name, folder), lambda: read_csv((folder or self.folder) / name))

    def records(self, name: str, kind: type[Record], grid: Sequence[str] = ()) -> list[Record]:
        """The rows of a CSV file as dataclasses of numbers, texts and truths (`read_records`)."""
        return self.once(("records", name), lambda: read_records(self.folder / name, kind, grid))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of an .npz file, by name.

        Raises:
            PageError: there is no such file, or it is damaged.
        """
        path = existing(self.folder / name)
        try:
            with np.load(path, allow_pickle=False) as found:
                return dict(found)
        except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise PageError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    def text(self, name: str) -> str:
        """The text of a file."""
        return existing(self.folder / name).read_text(encoding="utf-8")

    def step_costs(self, recipe: str, required: bool = True) -> list[dict[str, str]]:
        """What a training step of each variant costs, as the benchmark measured it; nothing where it need not have."""
        folder, name = self.root / "benchmarks" / "results", f"training_step_{recipe.replace('/', '_')}.csv"
        return self.rows(name, folder) if required or (folder / name).is_file() else []

    def once(self, key: object, read: Callable[[], Kept]) -> Kept:
        """What `read` returns, at the first call with a key."""
        if key not in self._read:
            self._read[key] = read()
        return self._read[key]
