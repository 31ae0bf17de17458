"""Rebuilding a module whose attention was swapped while it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from lightning_tasks.callbacks.configuring import overrides
from lightning_tasks.callbacks.swap import SwapAttention, carry_out

Module = TypeVar("Module", bound=pl.LightningModule)


def load_swapped(cls: type[Module], path: str | Path, **kwargs: Any) -> Module:
    """A module from a checkpoint that a trainer with :class:`SwapAttention` wrote, swapped as it was there.

    The network must be built by ``__init__`` or ``configure_model``, as ``cls.load_from_checkpoint`` asks too: only a
    trainer calls ``setup``, which may need its data.

    Args:
        cls: the module's own class, of either Lightning package.
        path: the checkpoint.
        **kwargs: for ``cls.load_from_checkpoint``: ``map_location``, ``strict``, ``weights_only`` and hyper-parameters.

    Raises:
        ValueError: if the checkpoint holds no swap, or the network is not there before ``setup``.
    """
    weights_only = kwargs.get("weights_only") is not False
    saved = torch.load(path, map_location="cpu", weights_only=weights_only).get("callbacks", {})
    states = [state for key, state in saved.items() if key.startswith(SwapAttention.__name__)]
    plans = [state["plan"] for state in states if state["plan"] is not None]
    if not plans:
        raise ValueError(
            f"{path} holds no swap: no SwapAttention took part in the training; use {cls.__name__}.load_from_checkpoint"
        )

    def configure_model(self: pl.LightningModule) -> None:
        cls.configure_model(self)  # type: ignore[arg-type]
        names = {name for name, _ in self.named_modules()}
        missing = [name for plan in plans for name in plan["layers"] if name not in names]
        if missing and overrides(self, "setup"):
            raise ValueError(
                f"{cls.__name__} has no {missing[0]!r} yet: it builds its network in setup(), which nothing calls when "
                "a checkpoint is loaded. Build it in __init__ or configure_model, or keep SwapAttention among the "
                f"trainer's callbacks and give the trainer the checkpoint: trainer.test({cls.__name__}(...), "
                "ckpt_path=...)"
            )
        for plan in plans:
            carry_out(self, plan)

    # Lightning calls configure_model after __init__ and before it loads weights: the one moment to swap.
    swapping: Any = type(cls.__name__, (cls,), {"configure_model": configure_model, "__module__": cls.__module__})
    module = swapping.load_from_checkpoint(path, **kwargs)
    module.__class__ = cls
    return module
