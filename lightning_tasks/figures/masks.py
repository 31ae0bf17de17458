"""Images and the masks over them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_tasks.figures.names import draw_legend, plain_names

_MOST_NAMED = 24


@plain_names()
def draw_masks(images: Sequence[np.ndarray], masks: Mapping[str, Sequence[np.ndarray]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: a row per image, the image and its masks painted over it, and a legend.

    Args:
        images: each ``[H, W, 3]``, uint8 or floats in [0, 1].
        masks: by title, one for each image, ``[H, W]``; labels that are no class stay unpainted.
        names: of the classes.
    """
    from matplotlib import colormaps
    from matplotlib.colors import NoNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height, width = images[0].shape[:2]
    size = (1.5 + 8 / 3 * (1 + len(masks)), 0.5 + 2.6 * len(images) * height / width)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(images), 1 + len(masks), squeeze=False)
    palette = colormaps["tab20" if len(names) <= 20 else "gist_ncar"].resampled(max(len(names), 2))
    for axes, image, *of_image in zip(panels, images, *masks.values(), strict=True):
        for panel, mask, title in zip(axes, (None, *of_image), ("image", *masks), strict=True):
            panel.imshow(image)
            if mask is not None:
                painted = np.ma.masked_array(mask, (mask < 0) | (mask >= len(names)))
                panel.imshow(painted, cmap=palette, norm=NoNorm(), alpha=0.6, interpolation="nearest")
            panel.set_title(title, fontsize=8)
            panel.axis("off")
    present = set().union(*(np.unique(mask).tolist() for of_title in masks.values() for mask in of_title))
    shown = sorted(present & set(range(len(names))))
    entries = [(names[index], Patch(color=palette(index))) for index in shown[:_MOST_NAMED]]
    if len(shown) > _MOST_NAMED:
        entries.append((f"and {len(shown) - _MOST_NAMED} more", Patch(color="none")))
    draw_legend(figure, entries, loc="outside right upper", fontsize=7)
    return figure
