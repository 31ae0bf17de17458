"""The panels of a run's figure: which of its curves each shows."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tasks.runs.log import Curve
from lightning_tasks.runs.metric_names import MetricName

PANELS = (
    ("loss [nats]", ("train/loss", "val/loss", "train_loss", "val_loss")),
    ("top-1 accuracy", ("train/top1", "val/top1")),
    ("mean intersection over union", ("val/miou",)),
    ("attention entropy [nats]", ("attention/entropy",)),
    ("effective number of tokens [keys]", ("attention/effective_support",)),
    ("variance of the QK spectrum", ("qk_spectrum/variance",)),
)


def select(curves: dict[str, Curve], groups: Sequence[str]) -> dict[str, Curve]:
    """The curves that one panel shows: those of these groups; of one layer not its mean too."""
    names = {name: MetricName.parse(name) for name in curves}
    shown = {name: each for name, each in names.items() if any(each.is_below(group) for group in groups)}
    layers = sum(each.layer is not None for each in shown.values())
    return {name: curves[name] for name, each in shown.items() if layers != 1 or not each.is_mean}


def run_panels(curves: dict[str, Curve], metric: str = "") -> list[tuple[str, dict[str, Curve]]]:
    """The title and the curves of each panel that has any, the first of a metric that no other has, if it is named."""
    panels = [(title, shown) for title, groups in PANELS if (shown := select(curves, groups))]
    own = select(curves, (metric,)) if metric else {}
    shown_already = {name for _, shown in panels for name in shown}
    return [(metric, own), *panels] if own and not own.keys() & shown_already else panels
