"""Eigenvalue spectra, a layer a panel: over training, and in the complex plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_tasks.figures.names import plain_names

_BINS = 64
_COLORS = ("#d55e00", "#0072b2")


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


@plain_names()
def draw_eigenvalues(spectra: Mapping[str, Sequence[np.ndarray]], names: Sequence[str]) -> Any:
    """A Matplotlib figure: eigenvalues in the complex plane, the models side by side, each layer at its own scale.

    What is not finite is left out.

    Args:
        spectra: by the model's label, the complex eigenvalues of each layer.
        names: of the layers.
    """
    from matplotlib.figure import Figure

    shown = [
        (f"{name}, {label}" if len(spectra) > 1 else name, values[index], color)
        for index, name in enumerate(names)
        for (label, values), color in zip(spectra.items(), _COLORS, strict=False)
    ]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.7 * columns + 0.6, 2.4 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (title, values, color) in zip(panels.flat, shown, strict=False):
        axes.axhline(0, color="0.85", linewidth=0.6, zorder=0)
        axes.axvline(0, color="0.85", linewidth=0.6, zorder=0)
        found = values[np.isfinite(values)]
        axes.plot(found.real, found.imag, ".", color=color, alpha=0.5, markersize=3, markeredgewidth=0)
        axes.set_title(title, fontsize=7)
        axes.tick_params(labelsize=6)
    figure.supxlabel("real part of an eigenvalue", fontsize=8)
    figure.supylabel("imaginary part", fontsize=8)
    return figure
