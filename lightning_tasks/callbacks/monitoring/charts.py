"""What a monitor logs by layer, as one W&B chart of several lines for each name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_tasks.runs.loggers import Curve, current_step, log_charts, loggers_named
from lightning_tasks.runs.metric_names import MetricName

MOST_POINTS = 4096  # of a line, however long the run: above it every second one goes, and every second new one


class _Line:
    """Points of a line, equally dense from the first to the last."""

    def __init__(self) -> None:
        self.curve: Curve = ([], [])
        self._given, self._stride = 0, 1

    def add(self, step: int, value: float) -> None:
        if self._given % self._stride == 0:
            self.curve[0].append(step)
            self.curve[1].append(value)
            if len(self.curve[0]) > MOST_POINTS:
                self.curve = self.curve[0][::2], self.curve[1][::2]
                self._stride *= 2
        self._given += 1


class LayerCharts:
    """Curves by name and layer, logged whole: ``charts/val/attention/entropy`` has one line per layer, and their mean.

    Nothing is kept where W&B does not log, and beyond rank zero.

    Args:
        monitor: whose charts they are, by which W&B names what holds their tables.
    """

    def __init__(self, monitor: str) -> None:
        self._monitor = monitor
        self._charts: dict[str, dict[str, _Line]] = {}
        self._is_new = False  # whether there are values that were never logged
        self._validations = 0

    def restart(self) -> None:
        """For another run of a trainer."""
        self._charts, self._is_new, self._validations = {}, False, 0

    def add(self, trainer: Any, step: int, values: Mapping[str, float]) -> None:
        """Keep the values whose names end in a layer (and pass) or ``mean``; those of heads are too many."""
        if not trainer.is_global_zero or not loggers_named(trainer, "WandbLogger"):
            return
        for name, value in values.items():
            parts = MetricName.parse(name)
            if parts.line and parts.kind != "head":
                self._charts.setdefault(parts.group, {}).setdefault(parts.label, _Line()).add(step, value)
                self._is_new = True

    def after_validation(self, trainer: Any, groups: tuple[str, ...] = ()) -> bool:
        """In a fit, keep what its validation logged of these groups; log after validation 1, 2, 4, 8, ...

        Returns whether that was now: what shows a whole history is due so often that its cost stays small.
        """
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return False
        if loggers_named(trainer, "WandbLogger"):
            metrics = trainer.callback_metrics
            names = [name for name in metrics if any(map(MetricName.parse(name).is_below, groups))]
            self.add(trainer, current_step(trainer), {name: float(metrics[name]) for name in names})
        self._validations += 1
        due = self._validations & (self._validations - 1) == 0
        if due:
            self.log(trainer)
        return due

    def log(self, trainer: Any) -> None:
        """Log every chart, in place of those that were logged before, unless these hold all values."""
        if self._is_new:
            charts = {
                f"charts/{name}": {label: line.curve for label, line in lines.items()}
                for name, lines in self._charts.items()
            }
            log_charts(trainer, self._monitor, charts, current_step(trainer))
        self._is_new = False
