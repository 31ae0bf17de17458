"""Start from the weights of a checkpoint, and from nothing else of it."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.callbacks.base import Callback
from lightning_tasks.callbacks.configuring import after_configure_model
from lightning_tasks.resuming import adopt_plain_weights, read_checkpoint


class InitFromCheckpoint(Callback):
    """Load the weights of the checkpoint at `path` once the model is built and swapped; optimizer and step stay new.

    The file is read with `weights_only=True`: it can hold no code. It is a Lightning checkpoint or a bare state_dict.
    Weights of plain attention also fill layers that are built with another mechanism (which layers is said): without a
    query its rows are left out, and what the mechanism alone has stays as it is.
    Put it after the callbacks that change the model.

    Raises:
        FileNotFoundError: no file at `path`.
        ValueError: the file is no checkpoint, or the names or shapes in the file do not fit the model.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--init_from {path}: no such file; give the path of a .ckpt file")
        self.path = path
        self._loaded = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have the weights loaded before the optimizers are made."""
        if not self._loaded:
            after_configure_model(pl_module, self, self._load)

    def _load(self, pl_module: pl.LightningModule) -> None:
        if self._loaded:
            return
        content = read_checkpoint(self.path)
        state, adopted = adopt_plain_weights(pl_module, content.get("state_dict", content))
        try:
            pl_module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"--init_from {self.path}: its weights do not fit {type(pl_module).__name__}; give the model the "
                f"settings that it was trained with. {error}"
            ) from error
        self._loaded = True
        if adopted:
            rank_zero_info(f"--init_from {self.path}: weights of plain attention now fill {', '.join(adopted)}")
