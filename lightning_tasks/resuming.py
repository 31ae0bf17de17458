"""What a checkpoint must share with the module that resumes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from attention_modules.hosts.base import Swapped


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on the CPU; it can hold no code.

    Raises:
        ValueError: if the file is no checkpoint, is cut short, or holds code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of another kind can fail in any way
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is another kind of file, is cut short, or holds more than "
            "tensors and plain data; give a whole .ckpt file"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, and a checkpoint is a dict; give a .ckpt file")
    return content


def refuse_other_layout(trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Refuse to resume a fit in which swapped layers have other Parameters than in the checkpoint.

    Weights load in either layout; the optimizer's state belongs to the Parameters as they were.

    Raises:
        ValueError: if a swapped layer's Parameters differ and the checkpoint holds the state of an optimizer.
    """
    if trainer.state.fn != "fit" or not checkpoint.get("optimizer_states"):
        return
    saved = {key: value.shape for key, value in checkpoint.get("state_dict", {}).items() if isinstance(value, Tensor)}
    for name, layer in pl_module.named_modules():
        if not isinstance(layer, Swapped):
            continue
        prefix = f"{name}." if name else ""
        before = {key.removeprefix(prefix): shape for key, shape in saved.items() if key.startswith(prefix)}
        trained = {key: value for key, value in layer.named_parameters() if value.requires_grad or key in before}
        gone = set(before) - set(layer.state_dict())
        other = [key for key, parameter in trained.items() if before.get(key) != parameter.shape]
        if before and (gone or other):
            changed = ", ".join(sorted({*gone, *other}))
            raise ValueError(
                f"the checkpoint cannot be resumed: {name!r} now has {type(layer.mechanism).__name__}, and the "
                f"optimizer's state is one of other Parameters (not as they were: {changed}). "
                "Resume with the attention that it was trained with, or take its weights only: --init_from in place of "
                "--ckpt_path (from Python: the callback lightning_tasks.callbacks.init_from.InitFromCheckpoint)"
            )
