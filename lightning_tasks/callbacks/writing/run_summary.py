"""What a run did, said at its end: the metric before and after, the swapped layers, the files, a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from attention_modules.base import described
from attention_modules.hosts.report import swapped_mechanisms
from lightning_tasks.callbacks.base import Callback, check_alone
from lightning_tasks.figures.run import draw_run
from lightning_tasks.runs.divergence import first_non_finite, is_loss
from lightning_tasks.runs.log import read_curves
from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.runs.metric_names import MetricName
from lightning_tasks.runs.panels import run_panels

FIGURE = "run.png"


class RunSummary(Callback):
    """Print a summary when `fit` ends and draw `run.png` beside the CSV log that it is read from.

    "Before" is the metric over the validation batches of the sanity check; all of them with
    `trainer.num_sanity_val_steps: -1`. Where a loss is NaN or infinite at the end, the last line says so.

    Args:
        metric: the logged metric to report.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import RunSummary
        >>> trainer = Trainer(callbacks=[RunSummary(metric="val/loss")], logger=False)
    """

    def __init__(self, metric: str = "val/perplexity") -> None:
        self.metric = metric
        self.before: float | None = None
        self.after: float | None = None

    def setup(self, trainer, pl_module, stage) -> None:
        """Refuse a second one, and forget an earlier fit."""
        check_alone(trainer, RunSummary)
        if stage == "fit":
            self.before = self.after = None

    def on_validation_end(self, trainer, pl_module) -> None:
        """Keep the first value as "before" and the newest as "after"."""
        value = trainer.callback_metrics.get(self.metric)
        if value is None:
            return
        if trainer.sanity_checking:
            self.before = float(value)
        else:
            self.after = float(value)

    @rank_zero_only
    def on_fit_end(self, trainer, pl_module) -> None:
        """Print, and draw."""
        lines = ["", self.text(pl_module, _csv_folder(trainer)), *divergence_of(trainer, self.metric)]
        if self.before is None and self.after is None:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            lines.append(f"{self.metric} was not logged in a validation; logged was {logged}: give one as metric=")
        print("\n".join(lines))

    def text(self, model: nn.Module, folder: Path | None) -> str:
        """The summary; `folder` is that of the CSV log, None where there is none."""
        lines = [
            f"{self.metric}: {_number(self.before)} before, {_number(self.after)} after training",
            f"swapped layers: {', '.join(swapped_layers(model)) or 'none'}",
        ]
        if folder is None:
            return "\n".join([*lines, "files of the log: none (the trainer has no CSV logger)"])
        figure = draw_run(run_panels(read_curves(folder / "metrics.csv"), self.metric), folder / FIGURE)
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        # W&B keeps dozens of files of its own there.
        files = sorted({"wandb/" if path.parts[0] == "wandb" else path.as_posix() for path in paths})
        lines += [f"files in {folder}: {', '.join(files)}"]
        return "\n".join([*lines, f"figure: {figure}" if figure else "figure: none (nothing of it was logged)"])


def swapped_layers(model: nn.Module) -> list[str]:
    """Each layer whose mechanism is not plain softmax attention, as "name (RPCAttention, iterations=4)"."""
    return [f"{name} ({described(mechanism)})" for name, mechanism in swapped_mechanisms(model).items()]


def divergence_of(trainer, *further: str) -> list[str]:
    """What :func:`divergence` says of a trainer's last losses, and of `further` metrics."""
    last = trainer.callback_metrics.items()
    losses = {name: float(value) for name, value in last if name in further or is_loss(name)}
    return divergence(losses, _csv_folder(trainer))


def divergence(losses: Mapping[str, float], folder: Path | None) -> list[str]:
    """A line that says which of the last values are not finite, and since which step the log has such; else none.

    Args:
        losses: the last value of each metric.
        folder: that of the CSV log; None where there is none.
    """
    log = None if folder is None else folder / "metrics.csv"
    since = first_non_finite(log) if log is not None and log.is_file() else {}
    # Lightning has the value of a step under two names, of which one is in the log.
    named = {str(MetricName.parse(name).at("")): value for name, value in losses.items()}
    bad = [
        f"{name} is {_number(value)}" + (f" (first at step {since[name]})" if name in since else "")
        for name, value in sorted(named.items())
        if not math.isfinite(value)
    ]
    return [f"diverged: {', '.join(bad)}"] if bad else []


def _csv_folder(trainer) -> Path | None:
    for logger in loggers_named(trainer, "CSVLogger"):
        logger.save()
        return Path(logger.log_dir)
    return None


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return "NaN" if math.isnan(value) else f"{value:.2f}"
