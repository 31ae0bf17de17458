"""The picture of an experiment on token selection: paths in a plane, probabilities and correlations over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor

from lightning_tasks.analyses.descent import Path


def plane(paths: Mapping[str, Tensor], direction: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Each path ``[points, d]`` along the direction, and at right angles to it, where the paths go most."""
    along = direction / direction.norm()
    rest = {run: path - (path @ along).unsqueeze(-1) * along for run, path in paths.items()}
    across = torch.linalg.svd(torch.cat(list(rest.values())), full_matrices=False)[2][0]
    return {run: (path @ along, rest[run] @ across) for run, path in paths.items()}


def draw(
    picture: File,
    paths: Mapping[str, Path],
    measures: Mapping[str, Mapping[str, Tensor]],
    p: Tensor,
    v: Tensor | None,
    regularized: str,
) -> None:
    """Draw the paths of p (and of v) against the max-margin directions, and the measures of the descents."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directions = {"p": p} if v is None else {"p": p, "v": v}
    panels = [*directions, "probability", *(f"correlation_{name}" for name in directions)]
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        if panel in directions:
            _draw_plane(
                axes, {run: getattr(path, panel) for run, path in paths.items()}, directions[panel], regularized
            )
            axes.set_title(f"path of {panel}", loc="left")
        else:
            for run, style in _styles(measures, regularized).items():
                if run != regularized:
                    axes.plot(measures[run][panel].numpy(), label=run, **style)
            axes.set_xlabel("step")
            titles = {"probability": "least probability of a selected token"}
            axes.set_title(titles.get(panel, f"cosine of {panel[-1]} to max-margin"), loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize="small", frameon=False)
    figure.savefig(picture, dpi=110)


def _draw_plane(axes: Any, paths: Mapping[str, Tensor], direction: Tensor, regularized: str) -> None:
    points = plane(paths, direction)
    for run, style in _styles(points, regularized).items():
        along, across = points[run]
        axes.plot(along.numpy(), across.numpy(), label=run, **style)
    longest = max(float(along.max()) for along, _ in points.values())
    axes.plot([0, longest], [0, 0], color="black", linewidth=0.8, linestyle="--", label="max-margin direction")
    axes.set_xlabel("along the max-margin direction")
    axes.set_ylabel("at right angles")


def _styles(runs: Iterable[str], regularized: str) -> dict[str, dict[str, Any]]:
    """How the line of each run looks: dashes let runs that lie on each other show."""
    lines = zip(runs, cycle(("-", "--", "-.", (0, (1, 1)))), strict=False)
    return {
        run: {"marker": "o", "markersize": 3, "linestyle": ":"}
        if run == regularized
        else {"linewidth": 1.6, "linestyle": line}
        for run, line in lines
    }
