"""Start from the weights of a checkpoint, and from nothing else of it."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class InitFromCheckpoint(Callback):
    """Load the weights of the checkpoint at `path` once the model is built (and swapped); optimizer and step stay new.

    The file is read with `weights_only=True`: it can hold no code. It is a Lightning checkpoint or a bare state_dict.

    Raises:
        FileNotFoundError: no file at `path`.
        ValueError: the names or shapes in the file do not fit the model.
    """

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"--init_from {path}: no such file; give the path of a .ckpt file")
        self.path = path
        self._wrapped = False
        self._loaded = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap `configure_model`, which runs after every `setup` and before the optimizers are made."""
        if self._wrapped:
            return
        build = pl_module.configure_model

        def configure_model() -> None:
            build()
            if not self._loaded:
                self._load(pl_module)
                self._loaded = True

        pl_module.configure_model = configure_model  # type: ignore[method-assign]
        self._wrapped = True

    def _load(self, pl_module: LightningModule) -> None:
        content = torch.load(self.path, map_location="cpu", weights_only=True)
        try:
            pl_module.load_state_dict(content.get("state_dict", content))
        except RuntimeError as error:
            raise ValueError(
                f"--init_from {self.path}: its weights do not fit {type(pl_module).__name__}; give the model the "
                f"settings that it was trained with. {error}"
            ) from error
