"""A program of two processes, of which the second meets NaN at its batch 2: guard_run.py FOLDER.

A fit that skips, then one that accumulates and stops, which ends the program.
"""

import math
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_tasks.callbacks import NonFiniteGuard
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, weights_of


class PoisonedSecond(TinyLM):
    def training_step(self, batch, batch_idx):
        factor = math.nan if self.global_rank == 1 and batch_idx == 2 else 1.0
        return factor * super().training_step(batch, batch_idx)


def fit(folder: Path, guard: NonFiniteGuard, **options) -> pl.LightningModule:
    module = PoisonedSecond()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=CSVLogger(folder),
        callbacks=[guard],
        **quiet,
        **options,
    )
    trainer.fit(module, batches(12))
    return module


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    guard = NonFiniteGuard("skip")
    skipped = fit(folder / "skip", guard)
    torch.save({"weights": weights_of(skipped), "skipped": guard.skipped}, folder / f"rank_{skipped.global_rank}.pt")
    fit(folder / "stop", NonFiniteGuard(), accumulate_grad_batches=2)
