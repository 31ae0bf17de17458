"""What a kind of task is asked and measured for a robustness table: the interface of the files `*_kind.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_tasks.robustness.attacks.common import NonFiniteLogitsError
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.runs.measurements import Advance, Measurement
from lightning_tasks.runs.robustness import GIVES_NAN, Row

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and what tells how long it will take.

    Args:
        measurements: in their order.
        one_pass: a forward pass over one batch.
        count: number of samples.
        batch_size: samples a batch.
        data: all samples, which the measurements depend on.
        unmeasured: rows that say what cannot be measured.
    """

    measurements: Sequence[Measurement[Row]]
    one_pass: Callable[[], object]
    count: int
    batch_size: int
    data: Sequence[Tensor]
    unmeasured: Sequence[Row] = ()


def nan_rows(measurement: Measurement[Row]) -> list[Row]:
    """The rows of a measurement of a model that gives nan."""
    return [Row(*line, math.nan, note=GIVES_NAN) for line in measurement.lines]


def nan_where_given(measurement: Measurement[Row]) -> Measurement[Row]:
    """The same measurement, whose figures are nan where the model's logits are not finite: a result, and no failure."""

    def measure(advance: Advance) -> list[Row]:
        try:
            return measurement.measure(advance)
        except NonFiniteLogitsError as error:
            rows = nan_rows(measurement)
            rank_zero_warn(f"{rows[0].label} is nan: {error}")
            return rows

    return replace(measurement, measure=measure)


class Kind(Protocol):
    """A kind of task."""

    def check(self, asked: RobustnessSettings) -> None:
        """Refuse what this kind has none of, before the test starts; warn of what is not measured.

        Raises:
            ValueError: for a setting that means nothing here.
        """

    def first(self, asked: RobustnessSettings, batch: Batch, room: int | None) -> Batch:
        """What of a test batch is measured, at most ``room`` images.

        Raises:
            ValueError: if it is not what this kind of task takes.
            ImportError: if a library that these images need is not installed.
        """

    def plan(self, asked: RobustnessSettings, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        """The measurements.

        Args:
            asked: the settings.
            model: the task in its trainer's precision.
            task: the LightningModule.
            trainer: its trainer.
            seen: of the test batches, on the CPU.

        Raises:
            ValueError: if something that was asked for cannot be measured of this task.
        """
