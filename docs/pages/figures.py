"""Figures that are made from raw files, and the digests by which a check knows that they are of today's."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from docs.pages import forest
from docs.pages.raw import Comparison
from lightning_tasks.figures import curves, masks

DIGESTS = "figures.json"


@dataclass(frozen=True)
class Figure:
    """A figure and what it shows.

    Args:
        draw: writes it into a file.
        data: what is drawn, of lists, dictionaries, texts and numbers.
        code: the module that draws it.
    """

    draw: Callable[[Path], None]
    data: Any
    code: ModuleType

    @property
    def digest(self) -> str:
        """Changes with the data, to eight digits, and with the code that draws, but not with its lines of comments."""
        data = json.dumps(_rounded(self.data), sort_keys=True)
        code = [line for line in inspect.getsource(self.code).splitlines() if not line.lstrip().startswith("#")]
        return hashlib.sha256("\n".join([data, *code]).encode()).hexdigest()[:16]


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, np.ndarray)):
        return [_rounded(each) for each in data]
    return float(f"{data:.8g}") if isinstance(data, (float, np.floating)) else data


def curves_of(comparison: Comparison, metrics: Sequence[str] | None = None) -> Figure:
    """The metrics of a comparison over the steps, as `attnswap compare` draws them."""
    from lightning_tasks.runs.divergence import diverged_configs

    names = comparison.metrics if metrics is None else metrics
    rows = [row for row in comparison.rows if row["metric"] in names]
    remarks = diverged_configs(comparison.rows)

    def draw(path: Path) -> None:
        figure = curves.draw_comparison(rows, comparison.configs, names, remarks)
        figure.savefig(path, dpi=110, format="png")

    drawn = [[row[key] for key in ("config", "seed", "step", "metric", "value")] for row in rows]
    return Figure(draw, [comparison.configs, list(names), drawn, remarks], curves)


def differences_of(comparison: Comparison, metric: str, title: str, scale: float = 1.0) -> Figure:
    """The paired differences of a metric to the first configuration, ordered, with their intervals."""
    first = comparison.configs[0]
    lines = [
        {
            "name": row.config,
            **{key: getattr(row, key) * scale for key in ("difference", "low", "high")},
            "holds": row.verdict in ("lower", "higher"),
        }
        for row in comparison.summary
        if row.metric == metric and row.reference == first
    ]

    def draw(path: Path) -> None:
        forest.draw_differences(lines, title).savefig(path, dpi=110, format="png")

    return Figure(draw, [lines, title], forest)


def masks_of(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> Figure:
    """Images, `image` ``[rows, 3, H, W]``, and the masks over them, each by its title ``[rows, H, W]``, all uint8."""
    painted = {title: [*each] for title, each in arrays.items() if title != "image"}

    def draw(path: Path) -> None:
        figure = masks.draw_masks([*arrays["image"].transpose(0, 2, 3, 1)], painted, names)
        figure.savefig(path, dpi=80, format="png")

    digests = {title: hashlib.sha256(each.tobytes()).hexdigest() for title, each in arrays.items()}
    return Figure(draw, [[*arrays], digests, list(names)], masks)
