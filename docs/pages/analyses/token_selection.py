"""Token selection: how near a trained prompt comes to the max-margin direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from docs.pages import tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import markdown, number
from lightning_tasks.analyses.token_selection_report import REGULARIZED
from lightning_tasks.figures import selection

COLUMNS = {"correlation_p": 4, "correlation_v": 4, "probability": 4, "norm_p": 1}


@lru_cache
def _rows(path: Path) -> list[dict[str, Any]]:
    """What was measured, in the order of the steps, which are texts where they have several forms."""
    rows = [row | {"seed": str(row["seed"]), "step": float(row["step"])} for row in tables.read(path).to_pylist()]
    return sorted(rows, key=lambda row: row["step"])


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else number(value, digits)


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """`cosines` gives those of a run at the end, of which `least` and `above` tell."""

    def last(experiment: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {(row["seed"], row["run"]): row for row in _rows(folder.path / f"{experiment}.parquet")}

    def cosines(run: str, experiments: Sequence[str], of: str = "p") -> list[float]:
        """Cosines to the max-margin direction at the end, one for each problem."""
        return [
            row[f"correlation_{of}"]
            for experiment in experiments
            for (_, name), row in last(experiment).items()
            if name == run
        ]

    def least(found: Sequence[float], digits: int = 4) -> str:
        """The least of them, rounded down."""
        return number(math.floor(min(found) * 10**digits) / 10**digits, digits)

    def above(found: Sequence[float], limit: float = 0.99) -> str:
        """How many are above a limit."""
        return f"{sum(each > limit for each in found)} of {len(found)}"

    def ends(*experiments: str) -> str:
        """All problems and runs, at the last step."""
        rows = [
            [experiment, *place, *(_cell(row[key], digits) for key, digits in COLUMNS.items())]
            for experiment in experiments
            for place, row in last(experiment).items()
        ]
        return markdown(["experiment", "problem", "run", "cosine of p", "of v", "least probability", "‖p‖"], rows)

    def paths(experiment: str) -> Figure:
        """The paths of p (and v) of the problem whose paths were kept, and what was measured over the steps."""
        points = tables.read(folder.path / f"{experiment}_paths.parquet").to_pylist()
        kept = {str(row["seed"]) for row in points}
        rows = [row for row in _rows(folder.path / f"{experiment}.parquet") if row["seed"] in kept]
        return Figure(lambda: selection.draw_selection(rows, points, REGULARIZED), [rows, points], selection)

    def together(experiment: str) -> Figure:
        """The paths of p of all problems."""
        points = tables.read(folder.path / f"{experiment}_paths.parquet").to_pylist()
        return Figure(lambda: selection.draw_together(points), points, selection)

    found = (cosines, least, above, ends, paths, together)
    return {word.__name__: word for word in found}
