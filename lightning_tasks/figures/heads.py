"""Heat maps of what was observed of each head: heads by layers, over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_tasks.figures.names import plain_names

MOST_PANELS = 6


@plain_names()
def draw_heads(steps: Sequence[int], layers: Sequence[int], values: np.ndarray, label: str) -> Any:
    """A Matplotlib figure: a panel per step (up to six, from the first to the last), heads to the right, layers down.

    Args:
        steps: when it was observed.
        layers: their numbers.
        values: ``[steps, layers, heads]``; nan stays white.
        label: what the colors, of one scale in all panels, mean.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_PANELS)).round().astype(int))
    heads = values.shape[2]
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    width, height = min(3.0, max(1.5, 0.25 * heads)), min(6.0, max(1.4, 0.25 * len(layers)))
    figure = Figure(figsize=(width * len(shown) + 1.4, height + 1.0), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    places = range(0, len(layers), -(-len(layers) // 8))
    for axes, place in zip(panels, shown, strict=True):
        image = axes.imshow(values[place], cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(f"step {steps[place]:,}", fontsize=8)
        axes.set_xlabel("head", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_yticks(places, [str(layers[place]) for place in places])
    panels[0].set_ylabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(panels), fraction=0.15 / len(shown), pad=0.01, aspect=15).set_label(
        label, fontsize=8
    )
    return figure
