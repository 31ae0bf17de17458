"""The figure of a run: loss, accuracy, attention and the QK spectrum over the steps, from the CSV log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_tasks.figures.names import draw_legend, plain_names

Curve = tuple[list[int], list[float]]


@plain_names()
def draw_run(panels: Sequence[tuple[str, Mapping[str, Curve]]], path: Path) -> Path | None:
    """Draw panels, each with a title and curves by name; return the file written, None where there are none."""
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (title, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        entries = []
        for name, (steps, values) in shown.items():
            marker = "o" if len(steps) < 30 else None
            (line,) = axes.plot(steps, values, linewidth=1.4, marker=marker, markersize=3)
            entries.append((name, line))
        axes.set_xlabel("step")
        axes.set_title(title, loc="left")
        draw_legend(axes, entries, fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
