"""A resumed fit of any module that draws and reads what the uninterrupted one would have."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_tasks.callbacks.base import Callback, kinds_of
from lightning_tasks.files.resume import go_on, keep_state, kept_state


class ExactResume(Callback):
    """Resumes a fit of any LightningModule with the random states of its checkpoint and at its place in the data.

    The place is known where ``train_dataloader`` gives a :class:`~attnswap.datamodules.ResumableLoader` or another
    loader with ``state_dict`` and ``load_state_dict``. Without this callback, Lightning forgets the place where
    ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``: it makes the loader then, before it reads the
    checkpoint, and does not tell it afterwards.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import ExactResume
        >>> trainer = Trainer(callbacks=[ExactResume()], logger=False)
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the random state of each process; every process calls this."""
        keep_state(trainer, pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the random states, and open again an epoch that was cut short."""
        self._kept = kept_state(checkpoint)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn where loaders beside each other are shuffled alike."""
        loaders = getattr(trainer.fit_loop._combined_loader, "flattened", [])
        samplers: list[Any] = [getattr(each, "sampler", None) for each in loaders]
        orders = [(each.seed, len(each)) for each in samplers if "EpochShuffle" in kinds_of(each)]
        if len({*orders}) < len(orders):
            rank_zero_warn(
                "training loaders of one length and seed are shuffled alike, so that a sample of the one always comes "
                "with the same of the other: for an order of its own, give ResumableLoader a "
                "generator=torch.Generator().manual_seed(...)"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the random state and at the place in the data."""
        go_on(trainer, pl_module, self._kept)
        self._kept = {}
