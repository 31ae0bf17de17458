"""What a kind of task is asked and measured for a robustness table: the interface of the files `*_kind.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.runs.measurements import Measurement
from lightning_tasks.runs.robustness import Row

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
