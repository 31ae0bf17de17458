"""A validation that a resumed run leaves out, said."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_tasks.callbacks.base import Callback


class WarnOfMissedValidation(Callback):
    """Warns where a fit resumes from a checkpoint that was saved before the end of the validation due at its step.

    `ModelCheckpoint` saves by `every_n_train_steps` before Lightning validates, and on resuming Lightning starts with
    the next step; so it does where SIGTERM cut the validation short (`SaveOnStop`).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import WarnOfMissedValidation
        >>> trainer = Trainer(callbacks=[WarnOfMissedValidation()], logger=False)
    """

    def __init__(self) -> None:
        self._checkpoint: dict[str, Any] | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loops = checkpoint.get("loops") or {}
        counts = loops.get("fit_loop", {})
        progress, validation = (counts.get(f"epoch_loop.{part}batch_progress") for part in ("", "val_loop."))
        cut = validation and validation["current"]["ready"] and not validation["is_last_batch"]
        own = {"epoch": checkpoint["epoch"], "cut": bool(cut), "path": trainer.ckpt_path}
        self._checkpoint = progress and {**progress, **own}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn where the checkpoint was the run's last, so that nothing is left to train."""
        self._warn(trainer)

    def _warn(self, trainer: pl.Trainer) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint and _was_due(trainer, checkpoint):
            path = checkpoint["path"]
            rank_zero_warn(
                f"a validation was due at step {trainer.global_step} and is left out: the checkpoint was saved before "
                "its end, and a resumed run starts with the next step; `attnswap validate` with the configuration of "
                f"the fit and --ckpt_path {path} makes up for it (from Python: trainer.validate(module, "
                f"ckpt_path={str(path)!r})). Where each counts, save at the end of validations (ModelCheckpoint "
                "without every_n_train_steps)"
            )


def _was_due(trainer: pl.Trainer, saved: dict[str, Any]) -> bool:
    """Whether Lightning's rule has a validation after the batch in whose end the checkpoint was saved."""
    current, every, epochs = saved["current"], trainer.val_check_batch, trainer.check_val_every_n_epoch
    within_the_batch = current["processed"] > current["completed"]
    if not (within_the_batch or saved["cut"]) or not trainer.enable_validation or not isinstance(every, (int, float)):
        return False
    if epochs is not None and (saved["epoch"] + 1) % epochs:
        return False
    if math.isinf(every):
        return bool(saved["is_last_batch"])
    batches = (saved["total"] if epochs is None else current)["ready"]
    return bool(batches % every == 0)
