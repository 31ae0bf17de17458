"""Masks as colours."""

import numpy as np
import torch
from torch import Tensor


def class_colours(num_classes: int) -> Tensor:
    """A colour for each class, `[num_classes, 3]` in [0, 1]; the same for the same number of classes."""
    from matplotlib import colormaps

    palette = colormaps["tab20" if num_classes <= 20 else "gist_ncar"].resampled(max(num_classes, 2))
    return torch.from_numpy(palette(np.arange(num_classes))[:, :3]).float()


def paint(image: Tensor, mask: Tensor, num_classes: int, opacity: float = 0.6) -> Tensor:
    """A picture `[3, H, W]` in [0, 1] under the colours of its mask `[H, W]`, where the mask has a class."""
    counts = (mask >= 0) & (mask < num_classes)
    colours = class_colours(num_classes)[mask.where(counts, 0)].permute(2, 0, 1)
    return torch.where(counts, (1 - opacity) * image + opacity * colours, image)
