"""Strategies under which Parameters and their gradients are not what a callback would read."""

from __future__ import annotations

import lightning.pytorch as pl

_CURES = {
    "FSDPStrategy": "FSDP1 flattens parameters; use ModelParallelStrategy (FSDP2) or DDP",
    "DeepSpeedStrategy": "DeepSpeed keeps gradients in its own buffers; use DDP",
}


def is_strategy(trainer: pl.Trainer, name: str) -> bool:
    """Whether the trainer's strategy is of a class of this name, of either Lightning package."""
    return any(kind.__name__ == name for kind in type(trainer.strategy).__mro__)


def refuse_flat_shards(trainer: pl.Trainer, what: str) -> None:
    """Refuse FSDP1 and DeepSpeed by name; ``what`` says who cannot do what, as ``"LocAteR cannot add to gradients"``.

    Raises:
        ValueError: under one of them, with the strategy to use.
    """
    for name, cure in _CURES.items():
        if is_strategy(trainer, name):
            raise ValueError(f"{what} here: {cure}")
