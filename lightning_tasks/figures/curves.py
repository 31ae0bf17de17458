"""The figure of a comparison: each metric over the steps, one line per configuration, its spread over seeds as a band.

Below it the differences to the first configuration, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_tasks.figures.names import draw_legend, plain_names

Look = tuple[str, tuple[float, ...]]  # a color, `#rrggbb`, and lengths of dashes and gaps, () for a whole line
_LARGEST = 1e100  # that an axis takes: differences and squares are finite too


def looks(count: int) -> list[Look]:
    """A look of lines for each of `count` configurations, no two alike: ten colors, then the same ten in dashes.

    Beyond twenty a dot is added to the dash for every ten.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    table = colormaps["tab10"]
    dashes = [(), *((6.0, 2.0) + (1.0, 2.0) * dots for dots in range(count // table.N))]
    return [(to_hex(table(index % table.N)), dashes[index // table.N]) for index in range(count)]


def draw_curve(axes: Any, rows: Sequence[dict[str, Any]], metric: str, config: str, look: Look) -> list[Any]:
    """Draw the means of a configuration over the steps, and their standard deviations over seeds as a band.

    Returns:
        The line of the means; none where the metric was not logged.
    """
    steps, means, spreads = curve(rows, metric, config)
    if not len(steps):
        return []
    color, dashes = look
    marker = "o" if len(steps) < 30 else None
    style = (0, dashes) if dashes else "-"
    axes.fill_between(steps, means - spreads, means + spreads, color=color, alpha=0.15)
    return list(axes.plot(steps, means, color=color, linestyle=style, linewidth=1.4, marker=marker, markersize=3))


def curve(rows: Sequence[dict[str, Any]], metric: str, config: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, means and standard deviations over seeds (0 for one seed) of a metric, each ``[steps]``.

    What is too large for an axis is nan, a gap in the curve.
    """
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row["metric"] == metric and row["config"] == config:
            by_step.setdefault(row["step"], []).append(row["value"])
    steps = sorted(by_step)
    spreads = [_spread(by_step[step]) for step in steps]
    means = drawable([float(np.mean(by_step[step])) for step in steps])
    return np.array(steps), means, np.where(np.isfinite(means), spreads, np.nan)


def drawable(values: Any) -> np.ndarray:
    """The values, an array, with nan in the place of what is not finite or too large for an axis."""
    return np.where(np.abs(values) < _LARGEST, values, np.nan)


def _spread(values: Sequence[float]) -> float:
    if not np.isfinite(values).all():
        return math.nan
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def paired_differences(rows: Sequence[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """Rows with the value of configuration ``first``, of the same metric, seed and step, taken off."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["metric"], row["seed"], row["step"]

    base = {place(row): row["value"] for row in rows if row["config"] == first}
    return [
        {**row, "value": row["value"] - base[place(row)]}
        for row in rows
        if row["config"] != first and place(row) in base
    ]


@plain_names()
def draw_comparison(
    rows: Sequence[dict[str, Any]], configs: Sequence[str], metrics: Sequence[str], remarks: Mapping[str, str]
) -> Any:
    """A figure with two panels for each metric that was logged, None where none was.

    ``remarks`` are what the legend adds to the names of configurations.

    Metrics of one step, such as those of a test, are no curves: the tables have them, and they are drawn only where
    there is nothing else.
    """
    steps = {metric: {row["step"] for row in rows if row["metric"] == metric} for metric in metrics}
    shown = [metric for metric in metrics if len(steps[metric]) > 1] or [metric for metric in metrics if steps[metric]]
    if not shown:
        return None
    from matplotlib.figure import Figure

    differences = paired_differences(rows, configs[0])
    kinds = [(rows, ""), *([(differences, f", difference to {configs[0]}")] if differences else [])]
    figure = Figure(figsize=(5 * len(shown), 3.8 * len(kinds)), layout="constrained")
    drawn: dict[str, list[Any]] = {config: [] for config in configs}
    for (values, kind), line in zip(kinds, figure.subplots(len(kinds), len(shown), squeeze=False), strict=True):
        for axes, metric in zip(line, shown, strict=True):
            for config, look in zip(configs, looks(len(configs)), strict=True):
                drawn[config] += draw_curve(axes, values, metric, config, look)
            axes.set_xlabel("step")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{metric}{kind}", loc="left", fontsize="medium")
            if kind:
                axes.axhline(0.0, color="0.5", linewidth=0.8, linestyle=":")
    entries = [(f"{config}{remarks.get(config, '')}", lines[0]) for config, lines in drawn.items() if lines]
    draw_legend(figure.axes[0], entries, fontsize="small", frameon=False)  # of all panels: not each has every curve
    return figure
