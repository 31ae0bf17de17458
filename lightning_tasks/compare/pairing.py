"""Record what makes two runs a pair: the weights they start from and the batches they see."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from attention_modules.hosts.trained import plain_parameters
from lightning_tasks.files.digests import update_digest


class RecordPairing(Callback):
    """Digest the parameters before the first step, and every training batch in order; keep the run's folder.

    Parameters are digested by name, shape and content as they were before attention was swapped: what a mechanism adds
    has no counterpart in the other run, and the query that one drops is kept beside it.
    """

    def __init__(self) -> None:
        self.initial_weights = ""
        self.folder: str | None = None
        self.training_data = ""
        """Digest of the batches seen so far: of the digest before the last one, and of that one."""

    def state_dict(self) -> dict[str, str]:
        """The digests."""
        return {"initial_weights": self.initial_weights, "training_data": self.training_data}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Go on with them."""
        self.initial_weights, self.training_data = state_dict["initial_weights"], state_dict["training_data"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Digest the weights, after build, swap and restore; not those with which a killed run goes on."""
        self.folder = trainer.log_dir
        if self.initial_weights:
            return
        digest = hashlib.sha256()
        for name, parameter in sorted(plain_parameters(pl_module).items()):
            digest.update(name.encode())
            update_digest(digest, parameter)
        self.initial_weights = digest.hexdigest()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Digest the tensors of a batch."""
        digest = hashlib.sha256(self.training_data.encode())
        for tensor in _tensors(batch):
            update_digest(digest, tensor)
        self.training_data = digest.hexdigest()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, however deep they lie in lists, dataclasses and mappings (`BatchEncoding` is no dict)."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))
