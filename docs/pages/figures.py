"""Figures that are made from raw tables, and the digests by which a check knows that they are of today's."""

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
from docs.pages.language import Folder
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.figures import curves, masks
from lightning_tasks.runs.divergence import diverged_configs


@dataclass(frozen=True)
class Figure:
    """A figure.

    Args:
        draw: gives it, as a figure of matplotlib.
        data: what is drawn, of lists, dictionaries, texts and numbers.
        code: the module that draws it.
    """

    draw: Callable[[], Any]
    data: Any
    code: ModuleType

    @property
    def digest(self) -> str:
        """Changes with the data, to eight digits, and with the code that draws."""
        data = json.dumps(_rounded(self.data), sort_keys=True)
        return hashlib.sha256((data + inspect.getsource(self.code)).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write it with 256 colors, a third of the bytes; those of a legend stay what they are."""
        from PIL import Image

        self.draw().savefig(path, dpi=110, format="png")
        with Image.open(path) as image:
            reduced = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        reduced.save(path, format="png", optimize=True)


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, np.ndarray)):
        return [_rounded(value) for value in data]
    return float(f"{data:.8g}") if isinstance(data, (float, np.floating)) else data


def digest_of(path: Path) -> str:
    """The digest of a file; "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _forest(rows: Mapping[str, SummaryRow], title: str, scale: float) -> Figure:
    lines: Sequence[Mapping[str, Any]] = [
        {
            "name": name,
            **{key: getattr(row, key) * scale for key in ("difference", "low", "high")},
            "holds": row.verdict in ("lower", "higher"),
        }
        for name, row in rows.items()
    ]
    return Figure(lambda: forest.draw_differences((lines, title)), [lines, title], forest)


def figure_words(folder: Folder) -> dict[str, Callable[..., Figure]]:
    """The words of pages that give a figure."""

    def curves_of(*metrics: str, place: str = "") -> Figure:
        """Metrics of a comparison over the steps, as `attnswap compare` draws them; by default those that it named."""
        found = folder.folder(place).comparison if place else folder.comparison
        names = [*metrics] or found.record.metrics
        rows = [row for row in found.rows if row["metric"] in names]
        remarks = diverged_configs(found.told)
        drawn = [[row[key] for key in ("config", "seed", "step", "metric", "value")] for row in rows]
        return Figure(
            lambda: curves.draw_comparison(rows, found.configs, names, remarks),
            [found.configs, names, drawn, remarks],
            curves,
        )

    def forest_of(metric: str, title: str, scale: float = 1.0, of: Folder = folder) -> Figure:
        """The paired differences of a metric to the first configuration, ordered, with their intervals."""
        found = of.comparison
        first = found.configs[0]
        rows = {row.config: row for row in found.summary if (row.metric, row.reference) == (metric, first)}
        return _forest(rows, title, scale)

    def differences_of(
        pairs: Mapping[str, Sequence[str]], title: str, scale: float = 1.0, of: Folder = folder
    ) -> Figure:
        """The same of single differences by their names: each a metric, a configuration, and perhaps a reference."""
        found = of.comparison
        rows = {name: found.row(*([*pair, found.configs[0]][:3])) for name, pair in pairs.items()}
        return _forest(rows, title, scale)

    def beside(*forests: Figure) -> Figure:
        """Several of these in one figure."""
        panels = [each.data for each in forests]
        return Figure(lambda: forest.draw_differences(*panels), panels, forest)

    def masks_of(file: str, names: Sequence[str]) -> Figure:
        """Images, `image` ``[rows, 3, H, W]`` of an .npz file, and the masks over them by title ``[rows, H, W]``."""
        with np.load(folder.path / file) as arrays:
            images = {title: arrays[title] for title in arrays.files}
        painted = {title: [*each] for title, each in images.items() if title != "image"}
        digests = {title: hashlib.sha256(each.tobytes()).hexdigest() for title, each in images.items()}
        rows = [*images["image"].transpose(0, 2, 3, 1)]
        return Figure(lambda: masks.draw_masks(rows, painted, names), [digests, list(names)], masks)

    return {
        "curves": curves_of,
        "forest": forest_of,
        "differences": differences_of,
        "beside": beside,
        "masks": masks_of,
    }
