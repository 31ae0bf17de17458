"""The picture of a comparison: each metric over the steps, a line a configuration, its spread over seeds as a band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def curve(rows: Sequence[dict[str, Any]], metric: str, config: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, means and standard deviations over seeds (0 for one seed) of a metric, each ``[steps]``."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row["metric"] == metric and row["config"] == config:
            by_step.setdefault(row["step"], []).append(row["value"])
    steps = sorted(by_step)
    means = [float(np.mean(by_step[step])) for step in steps]
    spreads = [float(np.std(by_step[step], ddof=1)) if len(by_step[step]) > 1 else 0.0 for step in steps]
    return np.array(steps), np.array(means), np.array(spreads)


def draw_comparison(
    rows: Sequence[dict[str, Any]], configs: Sequence[str], metrics: Sequence[str], picture: Path
) -> Path | None:
    """Draw a panel for each metric that was logged; return the file written, None where none was."""
    shown = [metric for metric in metrics if any(row["metric"] == metric for row in rows)]
    if not shown:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(shown), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for config in configs:
            steps, means, spreads = curve(rows, metric, config)
            if len(steps):
                (line,) = axes.plot(steps, means, label=config, linewidth=1.4, marker="o", markersize=3)
                axes.fill_between(steps, means - spreads, means + spreads, color=line.get_color(), alpha=0.15)
        axes.set_xlabel("step")
        axes.set_title(metric, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize="small", frameon=False)
    figure.savefig(picture, dpi=150)
    return picture
