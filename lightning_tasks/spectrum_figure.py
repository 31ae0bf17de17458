"""Eigenvalue spectra over training, a layer a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_BINS = 64


def draw_spectra(steps: Sequence[int], spectra: Sequence[Sequence[np.ndarray]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: histograms side by side, one a step, in a panel a layer.

    Args:
        steps: when the spectra were taken.
        spectra: for each step, the real parts of the eigenvalues of each layer.
        names: of the layers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.4 * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for index, name in enumerate(names):
        axes = panels.flat[index]
        of_layer = [spectrum[index] for spectrum in spectra]
        everything = np.concatenate(of_layer)
        edges = np.histogram_bin_edges(everything, _BINS)
        shares = np.stack([np.histogram(values, edges)[0] / len(values) for values in of_layer], axis=1)
        # Equal columns, whatever the distance of their steps; single eigenvalues far out should be seen on the white.
        shown = np.where(shares > 0, shares**0.5, np.nan)
        axes.imshow(
            shown,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            extent=(0, len(steps), *edges[[0, -1]]),
        )
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 4)).round().astype(int))
        axes.set_xticks(places + 0.5, [f"{steps[place]:,}" for place in places], fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(name, fontsize=8, parse_math=False)
    panels[0, 0].set_ylabel("eigenvalue (real part)", fontsize=8)
    panels[-1, 0].set_xlabel("step", fontsize=8)
    return figure
