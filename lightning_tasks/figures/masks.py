"""Images, true and predicted masks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_NAMED = 24


def draw_masks(rows: Sequence[tuple[Tensor, Tensor | None, Tensor]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: a row per image, its true and its predicted classes over it, and a legend.

    Args:
        rows: image ``[3, H, W]`` in [0, 1], truth and prediction ``[H, W]``; labels that are no class stay unpainted.
            Truth is None in all or in none.
        names: of the classes.
    """
    from matplotlib import colormaps
    from matplotlib.colors import NoNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height, width = rows[0][0].shape[-2:]
    figure = Figure(figsize=(9.5, 0.5 + 2.6 * len(rows) * height / width), layout="constrained")
    titles = ("image", "prediction") if rows[0][1] is None else ("image", "truth", "prediction")
    panels = figure.subplots(len(rows), len(titles), squeeze=False)
    palette = colormaps["tab20" if len(names) <= 20 else "gist_ncar"].resampled(max(len(names), 2))
    present: set[int] = set()
    for axes, (image, *both) in zip(panels, rows, strict=True):
        masks = [mask for mask in both if mask is not None]
        for panel, mask, title in zip(axes, (None, *masks), titles, strict=True):
            panel.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            if mask is not None:
                unpainted = (mask < 0) | (mask >= len(names))
                painted = np.ma.masked_array(mask.numpy(), unpainted.numpy())
                panel.imshow(painted, cmap=palette, norm=NoNorm(), alpha=0.6, interpolation="nearest")
            panel.set_title(title, fontsize=8)
            panel.axis("off")
        present |= set(torch.cat([mask.flatten() for mask in masks]).unique().tolist()) & set(range(len(names)))
    patches = [Patch(color=palette(index), label=names[index]) for index in sorted(present)[:_MOST_NAMED]]
    if len(present) > _MOST_NAMED:
        patches.append(Patch(color="none", label=f"and {len(present) - _MOST_NAMED} more"))
    figure.legend(handles=patches, loc="outside right upper", fontsize=7)
    return figure
