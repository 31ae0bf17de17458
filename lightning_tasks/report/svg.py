"""Figures of a report as SVG text that takes the page's colors: curves and heat maps of layers over steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from typing import Any

import numpy as np

from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.figures.curves import curve, draw_curve, drawable, looks
from lightning_tasks.figures.forest import draw_forest
from lightning_tasks.runs.metric_names import MetricName

_HOVERED = 24
_INK = "#010203"  # no figure has this color: it stands for that of the page's text


def curves_svg(rows: Sequence[dict[str, Any]], configs: Sequence[str], metric: str) -> str:
    """The metric over the steps, one line per configuration and its standard deviation over seeds as a band.

    Up to `_HOVERED` points of a line say their values where the pointer is over them.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(4.6, 2.8)
    titles = {}
    for number, (config, look) in enumerate(zip(configs, looks(len(configs)), strict=True)):
        draw_curve(axes, rows, metric, config, look)
        steps, means, _ = curve(rows, metric, config)
        shown = np.flatnonzero(np.isfinite(means))
        for place in shown[np.unique(np.linspace(0, len(shown) - 1, min(len(shown), _HOVERED)).astype(int))]:
            name = f"point-{number}-{steps[place]}-{_digest(metric)}"
            axes.plot(steps[place], means[place], "o", color=look[0], alpha=0.0, markersize=9, gid=name)
            titles[name] = f"{config}, step {steps[place]:,}: {means[place]:.4g}"
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return _titled(_svg(figure, metric), titles)


def forest_svg(rows: Sequence[SummaryRow], metric: str) -> str:
    """Paired differences with their 95% intervals, a row each, and a line at zero; estimates say their values."""
    figure, axes = _figure(4.6, 0.8 + 0.32 * len(rows))
    titles = {}
    for place, (row, point) in enumerate(zip(rows, draw_forest(axes, rows, _INK), strict=True)):
        name = f"forest-{place}-{_digest(metric)}"
        point.set_gid(name)
        titles[name] = f"{row.config} - {row.reference}: {row.difference:.4g} [{row.low:.4g}, {row.high:.4g}]"
    return _titled(_svg(figure, f"forest {metric}"), titles)


def _digest(metric: str) -> str:
    """Letters for an id that no other metric of the page has."""
    return sha256(metric.encode(errors="backslashreplace")).hexdigest()[:12]


def _titled(svg: str, titles: dict[str, str]) -> str:
    """The SVG whose groups of these ids have a title, which browsers show where the pointer is over them."""
    for name, title in titles.items():
        opened = f'<g id="{name}">'
        svg = svg.replace(opened, f"{opened}<title>{escape(title)}</title>", 1)
    return svg


def layer_metrics(metrics: Sequence[str]) -> dict[str, list[str]]:
    """The metrics that a monitor logged by layer, under the name that they share, by layer (and head or pass)."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for metric in metrics:
        name = MetricName.parse(metric)
        if name.layer is not None:
            label = f"{name.group} by {name.kind}" if name.kind else name.group
            found.setdefault(label, []).append((name.layer, name.part, metric))
    return {name: [metric for *_, metric in sorted(entries)] for name, entries in found.items()}


def heat_map(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> tuple[list[int], np.ndarray]:
    """Steps, and the means over seeds of metrics (one per layer) of one configuration, ``[metrics, steps]``."""
    values: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        values.setdefault((row["metric"], row["step"]), []).append(row["value"])
    wanted = set(metrics)
    steps = sorted({step for metric, step in values if metric in wanted})
    found = [[float(np.mean(values.get((metric, step), [np.nan]))) for step in steps] for metric in metrics]
    return steps, drawable(found)


def heat_svg(
    steps: Sequence[int], values: np.ndarray, metrics: Sequence[str], limits: tuple[float, float], label: str
) -> str:
    """A row per layer, a column per step that was logged, in the colors from `limits[0]` to `limits[1]`."""
    figure, axes = _figure(4.6, 1.1 + 0.2 * min(len(metrics), 24))
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=limits[0], vmax=limits[1])
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 5)).round().astype(int))
    axes.set_xticks(places, [f"{steps[place]:,}" for place in places])
    shown = np.unique(np.linspace(0, len(metrics) - 1, min(len(metrics), 12)).round().astype(int))
    axes.set_yticks(shown, [_row_label(metrics[place]) for place in shown])
    axes.set_xlabel("step")
    figure.colorbar(image, ax=axes)
    return _svg(figure, label)


def _row_label(metric: str) -> str:
    name = MetricName.parse(metric)
    if name.layer is None:
        raise ValueError(f"{metric!r} is no metric of a layer")
    return f"{name.layer} {name.part.replace('_', ' ')}".rstrip()


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _svg(figure: Any, salt: str) -> str:
    """The SVG element alone; ids hold `salt`, so that those of several figures on one page differ."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.tick_params(colors=_INK, which="both", labelsize=8)
        axes.patch.set_visible(False)
        for spine in axes.spines.values():
            spine.set_color(_INK)
    figure.patch.set_visible(False)
    for text in figure.findobj(Text):
        text.set_color(_INK)
        text.set_parse_math(False)
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")
