"""Callbacks that look at the first batch of every validation and test, and log the means of all processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl

from lightning_tasks.callbacks.base import Where
from lightning_tasks.callbacks.monitoring.charts import LayerCharts
from lightning_tasks.callbacks.monitoring.observer import LayerObserver
from lightning_tasks.callbacks.monitoring.warnings import warn_without_validation
from lightning_tasks.runs.metric_names import in_stage
from lightning_tasks.training.distributed import EpochSums, log_joined


class FirstBatchObserver(LayerObserver, shared=True):
    """Opens hooks for the first batch of a validation or test, logs at its end what subclasses add to ``_joined``."""

    group: ClassVar[str]
    """The first part of its metrics' names."""

    def __init__(self, where: Where, layers: list[int] | None, exclude: Sequence[str]) -> None:
        super().__init__(where, layers, exclude)
        self._joined = EpochSums()
        self._charts = LayerCharts(type(self).__name__)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._names(pl_module)  # warned of here, or refused where no layer matches, before anything is written
        warn_without_validation(trainer, self)
        self._charts.restart()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._names(pl_module)
        self._joined = EpochSums()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and dataloader_idx == 0 and not trainer.sanity_checking:
            self._open(pl_module)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and dataloader_idx == 0:
            self._open(pl_module)

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        self._end_batch(pl_module, "val")

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        self._end_batch(pl_module, "test")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.after_validation(trainer, (f"val/{self.group}",))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._charts.log(trainer)

    def _end_batch(self, pl_module: pl.LightningModule, stage: str) -> None:
        if self._hooks is not None:
            self._add_batch(pl_module, stage)

    def _log(self, pl_module: pl.LightningModule, stage: str) -> None:
        means = self._joined.join(pl_module.trainer, self._names(pl_module), pl_module.device)
        log_joined(pl_module, {in_stage(stage, name): mean for name, mean in means.items()})

    @abstractmethod
    def _names(self, pl_module: pl.LightningModule) -> list[str]:
        """What is logged, without the stage, the same on all processes; it may warn or refuse."""

    @abstractmethod
    def _open(self, pl_module: pl.LightningModule) -> None:
        """Hook what is to be seen."""

    @abstractmethod
    def _add_batch(self, pl_module: pl.LightningModule, stage: str) -> None:
        """Close, and add what was seen to ``_joined``; other processes may have no batch, so nothing is joined here."""
