"""The picture of the kernel-PCA measures over layers: the layer's own values, random ones, and what was published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

STYLES = {
    "layer": {"color": "#0072b2", "marker": "o"},
    "random values": {"color": "0.5", "marker": "x", "linestyle": ":"},
    "random linear map": {"color": "#009e73", "marker": "+", "linestyle": ":"},
}


def draw(picture: Path, means: Mapping[str, Mapping[str, Sequence[float]]], published: Mapping[str, float]) -> None:
    """Write the picture.

    Args:
        picture: the file.
        means: by kind of values, then by measure: one mean a layer.
        published: by measure, the largest that was published.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.6 * len(published), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (measure, largest) in zip(figure.subplots(1, len(published)), published.items(), strict=True):
        for kind, found in means.items():
            values = list(found.get(measure, ()))
            axes.plot(range(len(values)), values, label=kind, **STYLES[kind])
        axes.axhline(largest, color="#d55e00", linewidth=1, linestyle="--", label="largest published")
        axes.axhline(1, color="black", linewidth=0.8, label="what the reading predicts")
        axes.set_ylim(-0.05, 1.08)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(measure.replace("_", " "), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize="small", frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    figure.savefig(picture, dpi=110)
