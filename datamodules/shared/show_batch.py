"""A figure of a batch."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def draw_batch(images: Sequence[Tensor], titles: Sequence[str], path: Path) -> Path:
    """Draws images (each `[C, H, W]` in [0, 1], C of 1 or 3) in a grid under their titles into a PNG file.

    Raises:
        ValueError: there is no image.
    """
    from matplotlib.figure import Figure

    if not images:
        raise ValueError("there is no image to draw: the batch is empty")
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.axis("off")
    for axes, image, title in zip(panels, images, titles, strict=False):
        pixels = image.permute(1, 2, 0).numpy()
        axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
        axes.set_title(title[:22], fontsize=8, parse_math=False)  # a name of a folder may be no formula
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path


def class_colors(num_classes: int) -> Tensor:
    """A color for each class, `[num_classes, 3]` in [0, 1]; the same for the same number of classes."""
    from matplotlib import colormaps

    palette = colormaps["tab20" if num_classes <= 20 else "gist_ncar"].resampled(max(num_classes, 2))
    return torch.from_numpy(palette(np.arange(num_classes))[:, :3]).float()


def paint(image: Tensor, mask: Tensor, num_classes: int, opacity: float = 0.6) -> Tensor:
    """An image `[3, H, W]` in [0, 1] under the colors of its mask `[H, W]`, where the mask has a class."""
    counts = (mask >= 0) & (mask < num_classes)
    colors = class_colors(num_classes)[mask.where(counts, 0)].permute(2, 0, 1)
    return torch.where(counts, (1 - opacity) * image + opacity * colors, image)
