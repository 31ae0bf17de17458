"""Where a prompt goes under gradient descent: its paths against the max-margin direction, and how near it comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

Row = Mapping[str, Any]
_COLORS = ("#0072b2", "#d55e00")
_DASHES = ("-", "--", "-.", (0, (1, 1)))  # runs that lie on each other show


def draw_selection(rows: Sequence[Row], paths: Sequence[Row], regularized: str) -> Any:
    """A Matplotlib figure: the paths of p (and of v) in a plane, and what was measured of the descents over the steps.

    Args:
        rows: of one problem: run, step, probability, correlation_p, and correlation_v if v is learned.
        paths: of the same problem: parameter (p or v), run, along (the max-margin direction), across.
        regularized: the run that is no descent but a regularization path: dots, in the plane alone.
    """
    from matplotlib.figure import Figure

    planes = _grouped(paths, "parameter")
    titles = {"probability": "least probability of a selected token"}
    titles |= {f"correlation_{name}": f"cosine of {name} to max-margin" for name in planes}
    descents = {run: found for run, found in _grouped(rows, "run").items() if run != regularized}
    styles = dict(zip(descents, ({"linewidth": 1.6, "linestyle": each} for each in cycle(_DASHES)), strict=False))
    styles[regularized] = {"marker": "o", "markersize": 3, "linestyle": ":"}
    count = len(planes) + len(titles)
    figure = Figure(figsize=(4.2 * count, 3.8), layout="constrained")
    panels = figure.subplots(1, count)
    for axes, (name, found) in zip(panels, planes.items(), strict=False):
        _draw_plane(axes, _grouped(found, "run"), styles)
        axes.set_title(f"path of {name}", loc="left")
    for axes, (column, title) in zip(panels[len(planes) :], titles.items(), strict=True):
        for run, measured in descents.items():
            axes.plot([row["step"] for row in measured], [row[column] for row in measured], label=run, **styles[run])
        axes.set_xlabel("step")
        axes.set_title(title, loc="left")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize="small", frameon=False)
    return figure


def draw_together(paths: Sequence[Row]) -> Any:
    """A Matplotlib figure: the paths of p in all problems under their first two runs, fainter the earlier the problem.

    The last problem is dashed. The part of the plane is that of the released figure.

    Args:
        paths: seed (the problem), run, along (the max-margin direction), across.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    problems = _grouped(paths, "seed")
    first, last = next(iter(problems)), next(reversed(problems))
    for strength, (problem, found) in enumerate(problems.items(), 1):
        style = {"linestyle": "--"} if problem == last else {"alpha": strength / len(problems)}
        for color, (run, points) in zip(_COLORS, _grouped(found, "run").items(), strict=False):
            along, across = ([row[key] for row in points] for key in ("along", "across"))
            label = f"{run}: {first} (faint) to {last} (dashed)" if problem == last else None
            axes.plot(along, across, color=color, linewidth=1.4, label=label, **style)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-2, 12)
    axes.set_ylim(-6, 6)
    axes.set_xlabel("along the max-margin direction")
    axes.set_ylabel("at right angles")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="x-small", frameon=False, loc="upper left")
    return figure


def _draw_plane(axes: Any, runs: Mapping[str, Sequence[Row]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    longest = 0.0
    for run, found in runs.items():
        along = [row["along"] for row in found]
        axes.plot(along, [row["across"] for row in found], label=run, **styles[run])
        longest = max(longest, *along)
    axes.plot([0, longest], [0, 0], color="black", linewidth=0.8, linestyle="--", label="max-margin direction")
    axes.set_xlabel("along the max-margin direction")
    axes.set_ylabel("at right angles")


def _grouped(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row[key]), []).append(row)
    return found
