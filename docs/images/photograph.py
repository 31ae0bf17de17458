"""Where one patch of a photograph attends, in two Segmenters: `python docs/images/photograph.py SOFTMAX SYMMETRIC`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image
from torch.nn import functional as F

from attention_modules.hosts import attention_layers
from attnswap import swap_attention
from attnswap.analysis import attention_map
from attnswap.tasks import SegmentationTask

SIZE, PATCH = 240, 16
LAYERS = (0, 3)  # of four
POINT = (40, 150)  # row and column of the pixel whose patch asks: the sky beside the roof


def maps(checkpoint: str, image: torch.Tensor) -> list[torch.Tensor]:
    """The map of the asking patch over the image in each of LAYERS, the mean of its heads, ``[side, side]``."""
    task = SegmentationTask.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in attention_layers(task):
        if layer.mechanism is None:  # plain attention, which softmax shows
            swap_attention(task, "softmax", where=layer.name)
    for layer in attention_layers(task):
        layer.mechanism.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with torch.inference_mode():
        task(image[None])
    side = SIZE // PATCH
    asking = POINT[0] // PATCH * side + POINT[1] // PATCH
    found = []
    for index in LAYERS:
        q, k = seen[index]
        first = k.shape[2] - side * side
        weights = attention_map(q, k, rows=torch.tensor([first + asking]))[0, :, 0, first:].mean(0)
        found.append(weights.view(side, side))
    return found


def main(softmax: str, symmetric: str) -> None:
    photograph = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)[:, :, 100:527] / 255.0
    image = F.interpolate(photograph[None], (SIZE, SIZE), mode="bilinear", antialias=True)[0]
    figure = Figure(figsize=(9.6, 2.2), layout="constrained")
    axes = figure.subplots(1, 5)
    panels = [("photograph", None)]
    for name, checkpoint in (("softmax", softmax), ("symmetric", symmetric)):
        panels += [
            (f"{name}, layer {layer}", found) for layer, found in zip(LAYERS, maps(checkpoint, image), strict=True)
        ]
    for axis, (title, found) in zip(axes, panels, strict=True):
        axis.imshow(image.permute(1, 2, 0).numpy())
        if found is not None:
            axis.imshow(found.numpy(), extent=(0, SIZE, SIZE, 0), cmap="magma", alpha=0.75, vmin=0)
            print(title, "largest", round(found.max().item(), 4))
        axis.plot(POINT[1], POINT[0], "o", color="cyan", markersize=5, markeredgecolor="black")
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    figure.savefig(Path(__file__).with_name("photograph.png"), dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
