"""Local Lipschitz constants of attention over the largest norm R of a token, beside the bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.pages import tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import least_to_most, markdown, number, significant
from lightning_tasks.analyses import lipschitz_radii
from lightning_tasks.analyses.lipschitz_radii import Bounds, fit_of_radii, groups
from lightning_tasks.analyses.lipschitz_report import Row


@lru_cache
def _read(path: Path) -> tuple[list[Row], Bounds]:
    found = tables.read(path / "radii.parquet").to_pylist()
    rows = [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in found]
    return rows, {(row["layer"], row["radius"]): row["bound"] for row in found}


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """Slopes over R, how far the bound lies above the constants, a table and the figure."""
    rows, bounds = _read(folder.path)

    def slopes(kind: str, least: float, most: float) -> str:
        """The slopes of all layers between two radii."""
        kept = [row for row in rows if row.input == kind and least <= row.radius <= most]
        return least_to_most((fit_of_radii(found).slope for found in groups(kept).values()), 2)

    def above(kind: str, radius: float) -> str:
        """The bound over the largest constant of any sequence, by layer."""
        found = {
            layer: max(row.value for row in each if row.radius == radius)
            for (layer, name), each in groups(rows).items()
            if name == kind
        }
        return least_to_most((bounds[layer, radius] / value for layer, value in found.items()), 0)

    def means() -> str:
        """Mean constants at all radii, and the bound."""
        radii = sorted({row.radius for row in rows})
        lines = []
        for (layer, kind), found in groups(rows).items():
            cells = [significant(fmean(row.value for row in found if row.radius == radius)) for radius in radii]
            lines.append([layer.removesuffix(".attention.self"), kind, *cells])
        for layer in dict.fromkeys(row.layer for row in rows):
            cells = [significant(bounds[layer, radius]) for radius in radii]
            lines.append([layer.removesuffix(".attention.self"), "bound", *cells])
        return markdown(["layer", "input", *(f"R = {radius:g}" for radius in radii)], lines)

    def measured() -> Figure:
        """All constants over R, and the bound."""
        data = [[[row.layer, row.input, row.radius, row.value] for row in rows], [*bounds.values()]]
        return Figure(lambda: lipschitz_radii.draw_radii(rows, bounds), data, lipschitz_radii)

    def unconverged() -> str:
        """How many estimates did not converge."""
        return number(sum(not row.converged for row in rows), 0)

    found = (slopes, above, means, measured, unconverged)
    return {word.__name__: word for word in found}
