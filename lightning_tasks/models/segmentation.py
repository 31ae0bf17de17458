"""What a segmentation network is to its task, and which builder a description of one means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor, nn

from attention_modules.mechanism import nearest

# The key that tells what kind of model a description means -> module and class of its builder.
BUILDERS = {
    "backbone": ("lightning_tasks.models.segmenter_builder", "SegmenterBuilder"),
    "mmseg_config": ("lightning_tasks.models.mmseg_builder", "MMSegBuilder"),
}


class SegmentationNetwork(Protocol):
    """What a network that a :class:`SegmentationBuilder` builds has for its task, beside being a module."""

    def losses(self, images: Tensor, masks: Tensor, ignore_index: int) -> dict[str, Tensor]:
        """Loss terms by name, to be summed, of images ``[B, 3, H, W]`` in [0, 1] and masks ``[B, H, W]``."""

    def bands(self, images: Tensor) -> Iterator[Tensor]:
        """Log-probabilities or logits ``[B, K, rows, W]`` of whole images, band by band from the top."""

    def head_names(self) -> list[str]:
        """The modules and Parameters that have a part for each class."""


class SegmentationBuilder(ABC):
    """Checks the description of a network, and builds it.

    Args:
        description: plain data, with the key of `BUILDERS`.
        inference: how whole images are predicted, plain data.

    Raises:
        ValueError: for what can be told without building.
    """

    @abstractmethod
    def __init__(self, description: Mapping[str, Any], inference: Mapping[str, Any]) -> None: ...

    crop_size: int | None
    """H = W of training images that the network takes, None for any."""

    size_key: str
    """The key of the description that sets it."""

    @abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """The network, a :class:`SegmentationNetwork`."""


def segmentation_builder(description: Mapping[str, Any], inference: Mapping[str, Any]) -> SegmentationBuilder:
    """The builder that a description means.

    Raises:
        ValueError: if it has none of the keys that a builder is known by, or more than one.
    """
    found = [key for key in BUILDERS if key in description]
    if len(found) != 1:
        near = [name for key in description for name in nearest(key, BUILDERS, 1)]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"model needs one of the keys {', '.join(map(repr, BUILDERS))}, or the name of a timm backbone, got "
            f"{sorted(description)}{hint}"
        )
    module, name = BUILDERS[found[0]]
    return getattr(import_module(module), name)(description, inference)
