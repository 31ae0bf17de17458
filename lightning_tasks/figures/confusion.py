"""How a classifier did class by class: a table, and the confusion matrix as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_tasks.figures.names import plain_names

_MOST_NAMES = 40


@plain_names()
def draw_confusion(confusion: Tensor, names: Sequence[str]) -> Any:
    """A Matplotlib figure of counts ``[C, C]``, a row a true class, as shares of the row."""
    from matplotlib.figure import Figure

    shares = confusion.float() / confusion.sum(1, keepdim=True).clamp(min=1)
    size = min(12.0, max(4.0, 0.35 * len(names) + 2))
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(names) <= _MOST_NAMES:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    return figure
