"""The picture of a run: loss, accuracy, attention and the QK spectrum over the steps, from the CSV log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PANELS = (
    ("loss [nats]", ("train/loss", "val/loss")),
    ("top-1 accuracy", ("train/top1", "val/top1")),
    ("mean intersection over union", ("val/miou",)),
    ("attention entropy [nats]", ("attention/entropy",)),
    ("effective support of attention [keys]", ("attention/effective_support",)),
    ("variance of the QK spectrum", ("qk_spectrum/variance",)),
)
Curve = tuple[list[int], list[float]]


def select(curves: dict[str, Curve], prefixes: Sequence[str]) -> dict[str, Curve]:
    """The curves that one panel shows: those named so, or grouped under such a name; of one layer not its mean too."""
    shown = {
        name: curve
        for name, curve in curves.items()
        if any(name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)
    }
    layers = sum("/layer_" in name for name in shown)
    return {name: curve for name, curve in shown.items() if layers != 1 or not name.endswith("/mean")}


def draw_run(curves: dict[str, Curve], picture: Path) -> Path | None:
    """Draw a panel for each of `PANELS` that has curves; return the file written, None where none has."""
    panels = [(title, shown) for title, prefixes in PANELS if (shown := select(curves, prefixes))]
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (title, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, (steps, values) in shown.items():
            axes.plot(steps, values, label=name, linewidth=1.4, marker="o" if len(steps) < 30 else None, markersize=3)
        axes.set_xlabel("step")
        axes.set_title(title, loc="left")
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    return picture
