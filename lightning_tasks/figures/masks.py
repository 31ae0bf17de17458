"""Images, true and predicted masks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.shared.picture import class_colours, paint

_MOST_NAMED = 24


def draw_masks(rows: Sequence[tuple[Tensor, Tensor | None, Tensor]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: an image a row, its true and its predicted classes over it, and a legend.

    Args:
        rows: image ``[3, H, W]`` in [0, 1], truth and prediction ``[H, W]``; labels that are no class stay unpainted.
            Truth is None in all or in none.
        names: of the classes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height, width = rows[0][0].shape[-2:]
    figure = Figure(figsize=(9.5, 0.5 + 2.6 * len(rows) * height / width), layout="constrained")
    FigureCanvasAgg(figure)
    titles = ("image", "prediction") if rows[0][1] is None else ("image", "truth", "prediction")
    panels = figure.subplots(len(rows), len(titles), squeeze=False)
    present: set[int] = set()
    for axes, (image, *both) in zip(panels, rows, strict=True):
        masks = [mask for mask in both if mask is not None]
        shown = (image, *(paint(image, mask, len(names)) for mask in masks))
        for panel, picture, title in zip(axes, shown, titles, strict=True):
            panel.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy())
            panel.set_title(title, fontsize=8)
            panel.axis("off")
        present |= set(torch.cat([mask.flatten() for mask in masks]).unique().tolist()) & set(range(len(names)))
    colours = class_colours(len(names)).tolist()
    patches = [Patch(color=colours[index], label=names[index]) for index in sorted(present)[:_MOST_NAMED]]
    if len(present) > _MOST_NAMED:
        patches.append(Patch(color="none", label=f"and {len(present) - _MOST_NAMED} more"))
    figure.legend(handles=patches, loc="outside right upper", fontsize=7)
    return figure
