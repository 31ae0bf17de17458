"""Weights of an image classifier as the start of a segmentation model's backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm.layers import resample_abs_pos_embed
from torch import nn

from lightning_tasks.resuming import read_checkpoint

_PREFIX = "model."
_POSITIONS = "pos_embed"


def load_backbone(network: nn.Module, path: str) -> None:
    """Fill ``network.backbone`` from the checkpoint of an image classifier; its head is left out.

    Position embeddings are resized to the backbone's grid. Swap first: the backbone then takes weights of a plain and
    of a swapped classifier.

    Args:
        network: it has a `backbone`, a timm model.
        path: a Lightning checkpoint whose weights stand under `model.`.

    Raises:
        FileNotFoundError: no file at ``path``.
        ValueError: if the weights do not fit, or the backbone is none of timm's.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"backbone_checkpoint={path}: no such file; give the path of a .ckpt file")
    content = read_checkpoint(path)
    weights = {
        name.removeprefix(_PREFIX): value
        for name, value in content.get("state_dict", content).items()
        if name.startswith(_PREFIX) and not name.startswith(f"{_PREFIX}head")
    }
    backbone: Any = network.backbone
    if not hasattr(backbone, "num_prefix_tokens"):
        raise ValueError(
            f"backbone_checkpoint={path} goes into a timm backbone, and this one is a {type(backbone).__name__}; a "
            "model of mmsegmentation's takes `pretrained: true`, or --init_from PATH"
        )
    own = backbone.state_dict().get(_POSITIONS)
    if own is not None and _POSITIONS in weights and weights[_POSITIONS].shape != own.shape:
        rows, columns = backbone.patch_embed.grid_size
        weights[_POSITIONS] = resample_abs_pos_embed(
            weights[_POSITIONS],
            new_size=[rows, columns],
            num_prefix_tokens=own.shape[1] - rows * columns,  # some models give class tokens no position
        )
    try:
        backbone.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"backbone_checkpoint={path}: its weights do not fit the backbone; give the model and the attention that "
            f"they were trained with. {error}"
        ) from error
