"""mmsegmentation: what is to know of the ``nn.MultiheadAttention`` inside its wrappers.

Its vision transformers and Segmenter's decoder hold theirs at ``layers[i].attn.attn``, and call it sequence-first with
``need_weights=True``, the weights thrown away. A swapped layer reads that as torch's host does, and makes none there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from attention_modules.hosts.base import Host
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.torch import MultiheadAttentionHost
from attention_modules.mechanism import AttentionMechanism

_NO_ADAPTER = "no adapter yet"

REFUSED: dict[tuple[str, str], str] = {
    ("mmseg.models.backbones.beit", "BEiTAttention"): f"it adds a relative position bias, {_NO_ADAPTER}",
    ("mmseg.models.backbones.mae", "MAEAttention"): f"it adds a relative position bias, {_NO_ADAPTER}",
    ("mmseg.models.backbones.swin", "WindowMSA"): f"windows with a relative position bias, {_NO_ADAPTER}",
    ("mmseg.models.backbones.twins", "LocallyGroupedSelfAttention"): f"windows of its own, {_NO_ADAPTER}",
    ("mmseg.models.backbones.mscan", "MSCAAttention"): "a gate made by convolutions, not attention among tokens",
}


class ReducedKeysHost(MultiheadAttentionHost):
    """The layer inside SegFormer's efficient attention (Twins' too) whose keys come from a smaller image."""

    name = "mmsegmentation attention with reduced keys"
    tells_causality = True

    def understands(self, module: nn.Module) -> bool:
        return False  # alone it is torch's: only its parent tells

    def understands_in(self, module: nn.Module, parent: nn.Module | None) -> bool:
        return MultiheadAttentionHost.understands(self, module) and _reduction(parent) > 1

    def near_miss(self, module: nn.Module) -> str | None:
        return None

    def limits(self, layer: Any) -> Limits:
        return replace(super().limits(layer), of=_refusal)

    def settle(self, model: nn.Module) -> None:
        """Softmax makes no weights for wrappers that throw them away."""
        library = sys.modules["mmcv.cnn.bricks.transformer"]
        for wrapper in model.modules():
            mechanism = getattr(getattr(wrapper, "attn", None), "mechanism", None)
            if isinstance(wrapper, library.MultiheadAttention) and isinstance(mechanism, AttentionMechanism):
                mechanism.__dict__.setdefault("gives_weights", False)  # unless it is to be as the plain layer


def _reduction(parent: nn.Module | None) -> int:
    """The factor by which the sides of the image are reduced for the keys; 1 where ``parent`` is no such wrapper."""
    library = sys.modules.get("mmseg.models.backbones.mit")
    if library is None or not isinstance(parent, library.EfficientMultiheadAttention):
        return 1
    return int(parent.sr_ratio)


HOSTS: tuple[Host, ...] = (ReducedKeysHost(),)


def _refusal(mechanism: AttentionMechanism) -> str | None:
    if mechanism.uses_query and not mechanism.one_query_per_key:
        return None
    return (
        f"{type(mechanism).__name__} needs one query for each key, and this layer's keys come from a reduced image: "
        "leave it out by `layers` or `where`, or choose another mechanism"
    )
