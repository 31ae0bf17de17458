"""How the evaluation of a tested model resizes images: what timm says of the model, and what the data module asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_RESIZED = ("interpolation", "crop_pct", "crop_mode")


def evaluation_transform(model: nn.Module, datamodule: Any = None) -> dict[str, Any]:
    """Arguments of `timm.data.create_transform` by which images are resized as the model's own evaluation asks.

    Those of timm's data configuration of the first timm model in it. What the ``eval_transform`` of a data module of
    ``attnswap.datamodules`` names comes first. Empty, which means timm's defaults, where there is neither.

    Example:
        >>> import timm
        >>> from lightning_tasks.robustness.own_evaluation import evaluation_transform
        >>> evaluation_transform(timm.create_model("deit_tiny_patch16_224"))
        {'interpolation': 'bicubic', 'crop_pct': 0.9, 'crop_mode': 'center'}
    """
    from timm.data import resolve_model_data_config

    of_timm = next((part for part in model.modules() if isinstance(_configuration(part), Mapping)), None)
    known = {} if of_timm is None else resolve_model_data_config(of_timm)
    return {name: known[name] for name in _RESIZED if name in known} | dict(getattr(datamodule, "eval_transform", {}))


def _configuration(part: nn.Module) -> Any:
    return getattr(part, "pretrained_cfg", None)
