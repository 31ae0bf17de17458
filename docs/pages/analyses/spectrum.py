"""Eigenvalues of W_qᵀ W_k of all heads of a model, with random weights and with its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from docs.pages import tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import least_to_most, markdown, number, significant
from lightning_tasks.figures import spectrum

MODELS = ("before", "after")
WIDTH, HEAD_WIDTH = 384, 32  # of MiniLM


@lru_cache
def _rows(path: Path) -> list[dict[str, Any]]:
    return tables.read(path).to_pylist()


def _off_zero(row: dict[str, Any]) -> float:
    """|mean| in standard deviations."""
    return float(abs(row["mean"]) / row["variance"] ** 0.5)


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """How far means lie from zero, how variances grew, a table of layers and the figure."""
    rows = _rows(folder.path / "spectrum.parquet")

    def heads(model: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["model"] == model]

    def off_zero(model: str, most: bool = False) -> str:
        """|mean| over the standard deviation: the median over heads, or the largest."""
        return number((max if most else median)(map(_off_zero, heads(model))), 2)

    def bound() -> str:
        """The most that |mean| over the deviation can be at this rank: all eigenvalues but the zeros are equal."""
        return number((HEAD_WIDTH / (WIDTH - HEAD_WIDTH)) ** 0.5, 2)

    def two_largest() -> str:
        """The share of Σ|λ|² that a head's two largest eigenvalues have: the median over heads, and the largest."""
        squares: dict[tuple[str, int], list[float]] = {}
        for row in _rows(folder.path / "eigenvalues.parquet"):
            if row["model"] == "after":
                squares.setdefault((row["layer"], row["head"]), []).append(row["real"] ** 2 + row["imaginary"] ** 2)
        shares = [100 * sum(sorted(each)[-2:]) / sum(each) for each in squares.values()]
        return f"{number(median(shares), 0)}% in the median and {number(max(shares), 0)}% at most"

    def positive(model: str) -> str:
        """How many heads have a mean above zero."""
        return f"{sum(row['mean'] > 0 for row in heads(model))} of {len(heads(model))}"

    def deviation(model: str) -> str:
        """The standard deviation of the eigenvalues, from the least to the largest of any head."""
        return least_to_most((row["variance"] ** 0.5 for row in heads(model)), 3)

    def layers() -> str:
        """Means over the heads of each layer."""
        lines = []
        for layer in dict.fromkeys(row["layer"] for row in rows):
            of = [[row for row in heads(model) if row["layer"] == layer] for model in MODELS]
            means = [
                number(fmean(row["mean"] for row in each), digits) for each, digits in zip(of, (5, 3), strict=True)
            ]
            spreads = [significant(fmean(row["variance"] for row in each)) for each in of]
            scales = [significant(fmean(row["scale"] for row in each)) for each in of]
            lines.append([layer, *means, *spreads, *scales, number(max(map(_off_zero, of[1])), 2)])
        names = [f"{name}, {model}" for name in ("mean", "variance", "scale") for model in ("random", "trained")]
        return markdown(["layer", *names, "largest \\|mean\\| / deviation, trained"], lines)

    def plane() -> Figure:
        """All eigenvalues."""
        found: dict[str, dict[str, list[complex]]] = {model: {} for model in MODELS}
        for row in _rows(folder.path / "eigenvalues.parquet"):
            found[row["model"]].setdefault(row["layer"], []).append(complex(row["real"], row["imaginary"]))
        names = list(found["after"])
        values = {model: [np.array(each) for each in of.values()] for model, of in found.items()}
        data = {model: [[each.real, each.imag] for each in of] for model, of in values.items()}
        return Figure(lambda: spectrum.draw_eigenvalues(values, names), data, spectrum)

    found = (off_zero, bound, two_largest, positive, deviation, layers, plane)
    return {word.__name__: word for word in found}
