"""Eigenvalue spectra over training, a layer a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_tasks.figures.names import plain_names

_BINS = 64


@plain_names()
def draw_spectra(steps: Sequence[int], spectra: Sequence[Sequence[np.ndarray]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: histograms side by side, one per step, in a panel per layer; white where nothing is finite.

    Args:
        steps: when the spectra were taken.
        spectra: for each step, the real parts of the eigenvalues of each layer.
        names: of the layers.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.4 * rows + 0.3), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    histograms = [_histograms([spectrum[index] for spectrum in spectra]) for index in range(len(names))]
    # Single eigenvalues far out should be seen on the white: the color is the square root of their share.
    norm = PowerNorm(0.5, vmin=0.0, vmax=max(float(shares.max()) for shares, _ in histograms) or 1.0)
    for index, (name, (shares, edges)) in enumerate(zip(names, histograms, strict=True)):
        axes = panels.flat[index]
        image = axes.imshow(  # equal columns, whatever the distance of their steps
            np.where(shares > 0, shares, np.nan),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            norm=norm,
            extent=(0, len(steps), *edges[[0, -1]]),
        )
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 4)).round().astype(int))
        axes.set_xticks(places + 0.5, [f"{steps[place]:,}" for place in places], fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(name, fontsize=8)
    panels[0, 0].set_ylabel("eigenvalue (real part)", fontsize=8)
    panels[-1, 0].set_xlabel("step", fontsize=8)
    bar = figure.colorbar(image, ax=panels, fraction=0.15 / columns, pad=0.01)
    bar.set_label("share of a layer's eigenvalues in a bin\n(color: its square root)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def _histograms(spectra: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Shares of a layer's eigenvalues in each bin ``[bins, steps]``, of what is finite, and the bins' edges."""
    finite = [values[np.isfinite(values)] for values in spectra]
    edges = np.histogram_bin_edges(np.concatenate(finite), _BINS)
    shares = [np.histogram(some, edges)[0] / len(values) for some, values in zip(finite, spectra, strict=True)]
    return np.stack(shares, axis=1), edges
