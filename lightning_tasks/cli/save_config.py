"""The configuration of a run, saved in its folder and in its W&B run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.runs.wandb_runs import save_run


class SaveConfig(SaveConfigCallback):
    """Save the complete configuration in the run's own folder, and in the W&B run where there is one; say where.

    It is saved once everything is built, so that a run that cannot begin leaves no folder. Without a logger a run has
    no folder of its own, and nothing is saved: the working folder belongs to the user.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: the model is built after this."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a fit."""
        self._save(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save in the W&B run once more, into which Lightning has put the hyper-parameters in between."""
        self._save_in_wandb(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a validation (that of a fit finds it saved)."""
        self._save(trainer, pl_module, "validate")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a test."""
        self._save(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save for a prediction."""
        self._save(trainer, pl_module, "predict")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say to which W&B run the checkpoint belongs."""
        save_run(trainer, checkpoint)

    def _save(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            if not self.already_saved:
                rank_zero_info(f"attnswap: this run's files are in {trainer.log_dir}")
            super().setup(trainer, pl_module, stage)
        if trainer.state.fn != "fit":
            self._save_in_wandb(trainer)

    def _save_in_wandb(self, trainer: Trainer) -> None:
        """Put the configuration, nested as it is, into every W&B run (rank zero only).

        It comes after the module's hyper-parameters, among which may be a `model` too, of another form.
        """
        for logger in loggers_named(trainer, "WandbLogger") if trainer.is_global_zero else ():
            logger.experiment.config.update(self.config.as_dict(), allow_val_change=True)
