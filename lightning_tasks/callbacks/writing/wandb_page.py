"""What a run's page of W&B holds beside its curves: best values, the recipe, an alert of clipped heads."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl

from lightning_tasks.callbacks.base import Callback, kinds_of
from lightning_tasks.runs.files import run_folder
from lightning_tasks.runs.loggers import loggers_named, wandb_library
from lightning_tasks.runs.wandb_runs import alert

BEST = {
    "min": ("train/loss", "val/loss", "val/perplexity"),
    "max": ("val/top1", "val/top5", "val/accuracy", "val/miou"),
}
FILES = ("config.yaml", "environment.json", "hparams.yaml")  # the recipe as it ran, where, and what its swaps came to
CLIPPED = "qk_clip/clipped_heads"


class WandbPage(Callback):
    """Keeps the best value of each score in a W&B run's summary, and its resolved recipe as an artifact.

    The command adds it to a fit. It does nothing where W&B does not log, and beyond the first process.
    """

    def __init__(self) -> None:
        self._said = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say of which metrics the summary keeps the best value, also of what checkpoints are kept by."""
        best = {name: mode for mode, names in BEST.items() for name in names}
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        for each in callbacks:
            if "ModelCheckpoint" in kinds_of(each) and getattr(each, "monitor", None):
                best[str(vars(each)["monitor"])] = str(vars(each)["mode"])
        for run in _runs(trainer):
            for name, mode in best.items():
                run.define_metric(name, summary=f"{mode},last")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the recipe as an artifact."""
        runs, folder = _runs(trainer), run_folder(trainer)
        files = [folder / name for name in FILES if (folder / name).is_file()] if folder else []
        for run in runs if files else ():
            artifact = wandb_library().Artifact(re.sub(r"[^\w.-]", "_", f"run-{run.id}-recipe"), "recipe")
            for file in files:
                artifact.add_file(str(file))
            run.log_artifact(artifact)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Alert, once, where QKClip clips heads."""
        clipped = trainer.callback_metrics.get(CLIPPED)
        if not self._said and clipped is not None and trainer.is_global_zero and float(clipped) > 0:
            self._said = True
            alert("QKClip clips heads", f"{float(clipped):.0f} heads in step {trainer.global_step}")


def _runs(trainer: pl.Trainer) -> list[Any]:
    loggers = loggers_named(trainer, "WandbLogger") if trainer.is_global_zero else ()
    return [run for logger in loggers if not (run := logger.experiment).disabled]
