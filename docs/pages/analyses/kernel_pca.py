"""Is self-attention kernel PCA? Own values of layers beside those of random linear maps of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from docs.pages import forest, tables
from docs.pages.figures import Figure
from docs.pages.language import Folder
from docs.pages.numbers import markdown, number, significant
from lightning_tasks.analyses.kernel_pca_report import ALL_LAYERS, LINEAR, NOISE, OWN, Draw, Interval, Row, intervals

LARGER, SMALLER = ("matched_cosine", "linear_cka", "rbf_cka", "signed_cosine"), ("gamma_relative", "eigen_residual")
NEARER_IF = dict.fromkeys(LARGER, 1) | dict.fromkeys(SMALLER, -1)  # the side that the reading predicts
COURSES, EPOCHS = {"softmax": "softmax", "scaled": "Scaled Attention"}, (0, 1, 3, 9, 18)


@lru_cache
def _rows(path: Path) -> list[Row]:
    return tables.records(path / "kernel_pca.parquet", Row)


@lru_cache
def _drawn(path: Path) -> dict[str, Interval]:
    found = intervals(tables.records(path / "draws.parquet", Draw))
    return {each.measure: each for each in found if (each.layer, each.values) == (ALL_LAYERS, LINEAR)}


def _side(found: Interval) -> str:
    """Whether own values are nearer to what the reading predicts than all draws, or farther."""
    beaten = found.below if NEARER_IF[found.measure] > 0 else found.draws - found.below
    return {found.draws: "nearer", 0: "farther"}.get(beaten, "within")


def words(folder: Folder) -> dict[str, Callable[..., Any]]:
    """How often own values are nearer to the reading than random maps, |J|, two tables and a figure."""
    last = {
        f"{measure.replace('_', ' ')}, {name}": _drawn(folder.path / f"epochs/{course}_18")[measure]
        for course, name in COURSES.items()
        for measure in NEARER_IF
    }

    def mean(model: str, values: str, measure: str) -> float:
        return float(np.mean([getattr(row, measure) for row in _rows(folder.path / model) if row.values == values]))

    def with_one_map() -> str:
        """How many means of two trained models are nearer than those of one draw, and by how much at most."""
        pairs = [(model, measure) for model in ("cifar10_vit", "minilm") for measure in NEARER_IF]
        gains = [NEARER_IF[each] * (mean(model, OWN, each) - mean(model, LINEAR, each)) for model, each in pairs]
        return f"{sum(gain > 0 for gain in gains)} of {len(gains)} (by {significant(max(gains), 1)} at most)"

    def after_training(side: str, farthest: bool = True) -> str:
        """How many measures are nearer, or farther, than all draws, and how far from their mean at most."""
        apart = [abs(found.own - found.mean) for found in last.values() if _side(found) == side]
        return f"{len(apart)} of {len(last)}" + f" (by {number(max(apart), 3)} at most)" * farthest

    def loss(course: str, epoch: int) -> str:
        """The median of |J| over heads and samples."""
        rows = [row for row in _rows(folder.path / f"epochs/{course}_{epoch:02d}") if row.values == OWN]
        return number(float(np.median([abs(row.phi - row.h) for row in rows])), 2)

    def measures() -> str:
        """Means of each model's own values and of both controls, one draw."""
        pairs = [(measure, model) for measure in NEARER_IF for model in ("cifar10_vit", "minilm", "vit_random")]
        kinds = OWN, LINEAR, NOISE
        rows = [[*pair, *(number(mean(pair[1], kind, pair[0]), 3) for kind in kinds)] for pair in pairs]
        return markdown(["measure", "model", "own values", "random linear map", "random values"], rows)

    def course() -> str:
        """Own values; the mean of twenty draws with its interval; bold where nearer than all, italic where farther."""
        marks, rows = {"nearer": "**", "farther": "*", "within": ""}, []
        for measure in NEARER_IF:
            for course, name in COURSES.items():
                cells = []
                for found in (_drawn(folder.path / f"epochs/{course}_{epoch:02d}")[measure] for epoch in EPOCHS):
                    own, center, low, high = (number(getattr(found, key), 3) for key in ("own", "mean", "low", "high"))
                    cells.append("{0}{1}; {2} [{3}, {4}]{0}".format(marks[_side(found)], own, center, low, high))
                rows.append([measure, name, *cells])
        return markdown(["measure", "model", *(f"epoch {epoch}" for epoch in EPOCHS)], rows)

    def distances(title: str) -> Figure:
        """Own values less the draws, after training, to the right where nearer to what the reading predicts."""
        lines = []
        for name, found in last.items():
            sign = NEARER_IF[found.measure]
            low, high = sorted(sign * (found.own - each) for each in (found.least, found.most))
            center = {"difference": sign * (found.own - found.mean), "low": low, "high": high}
            lines.append({"name": name, **center, "holds": _side(found) != "within"})
        return Figure(lambda: forest.draw_differences((lines, title)), [lines, title], forest)

    def monitored(run: str, statistic: str, epoch: int) -> str:
        """The mean over layers that KernelPCAMonitor logged after an epoch."""
        rows = tables.read(folder.path / "monitor.parquet").to_pylist()
        values = [
            row["value"] for row in rows if (row["run"], row["statistic"], row["epoch"]) == (run, statistic, epoch)
        ]
        return number(float(np.mean(values)), 2)

    found = (with_one_map, after_training, loss, measures, course, distances, monitored)
    return {word.__name__: word for word in found}
