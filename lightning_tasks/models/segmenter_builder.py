"""The native Segmenter from its description."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from attention_modules.mechanisms.shared.options import check_integer
from lightning_tasks.models.segmentation import SegmentationBuilder
from lightning_tasks.models.segmenter import DECODERS, Segmenter
from lightning_tasks.models.sliding_window import Prediction, Windows
from lightning_tasks.models.timm_model import check_model_name

_ARGUMENTS = [name for name in inspect.signature(Segmenter).parameters if name != "num_classes"]


class SegmenterBuilder(SegmentationBuilder):
    """`{"backbone": NAME, ...}`: the arguments of :class:`~lightning_tasks.models.segmenter.Segmenter`.

    Windows have the size that the backbone is built for.

    Args:
        description: the arguments.
        inference: stride (half a window where None), windows_at_once, scales, flip.

    Raises:
        ValueError: for unknown arguments, backbones and decoders, and a stride above the window.
    """

    size_key = "img_size"

    def __init__(self, description: Mapping[str, Any], inference: Mapping[str, Any]) -> None:
        if unknown := [name for name in description if name not in _ARGUMENTS]:
            raise ValueError(f"model has the unknown key {unknown[0]!r}; Segmenter takes {', '.join(_ARGUMENTS)}")
        check_model_name(description["backbone"])
        if description.get("decoder", DECODERS[0]) not in DECODERS:
            raise ValueError(f"decoder is {description['decoder']!r}: give one of {', '.join(map(repr, DECODERS))}")
        self.arguments = dict(description)
        size = description.get("img_size", inspect.signature(Segmenter).parameters["img_size"].default)
        check_integer("img_size", size, 1)
        self.crop_size = None if (description.get("backbone_options") or {}).get("dynamic_img_size") else size
        stride = max(1, size // 2) if inference["stride"] is None else inference["stride"]
        windows = Windows(size, stride, inference["windows_at_once"])
        self.prediction = Prediction(windows, tuple(inference["scales"]), inference["flip"])

    def build(self, num_classes: int) -> nn.Module:
        network = Segmenter(num_classes=num_classes, **self.arguments)
        network.prediction = self.prediction
        return network
