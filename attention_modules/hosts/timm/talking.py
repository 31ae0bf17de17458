"""Attention whose layer mixes the maps of its heads by projections of its own: CaiT."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from attention_modules.base import AttentionMechanism, AttentionSpec
from attention_modules.hosts.base import Host
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.timm.base import SwappedTimm, TimmHost
from attention_modules.hosts.weights import Rows, wrapped_by_peft
from attention_modules.mechanisms.maps.talking_heads import TalkingHeadsAttention


class SwappedTalkingHeads(SwappedTimm):
    """``[B, N, C]``; the layer's ``proj_l`` and ``proj_w`` go to the mechanism, which has no matrices of its own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        projections = (self.proj_l, self.proj_w)
        mixers = [_weight(projection) for projection in projections]
        biases = [projection.bias for projection in projections]
        return self._leave(self._mix(*self._split(x), mixers=(*mixers, *biases)))


def _weight(projection: Any) -> Tensor:
    """``[H, H]``, adapters included."""
    if wrapped_by_peft(projection):
        return Rows(projection, 0, projection.out_features).weight()
    weight: Tensor = projection.weight
    return weight


class CaitHost(TimmHost):
    """CaiT's ``TalkingHeadAttn``: only talking heads leave its trained function what it is."""

    name = "timm cait TalkingHeadAttn"
    mixin = SwappedTalkingHeads
    library = "timm.models.cait"
    kind = "TalkingHeadAttn"

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        return dataclasses.replace(super().spec(layer, layer_index), mixes_heads=True)

    def limits(self, layer: Any) -> Limits:
        return dataclasses.replace(super().limits(layer), of=lambda mechanism: self._refusal(layer, mechanism))

    @staticmethod
    def _refusal(layer: Any, mechanism: AttentionMechanism) -> str | None:
        if not isinstance(mechanism, TalkingHeadsAttention):
            return (
                "talking heads: it mixes the maps of its heads by proj_l and proj_w, which only talking_heads keeps; "
                "choose that mechanism, or leave the layer out"
            )
        if layer.attn_drop.p > 0:
            return (
                f"it drops attention weights after they are mixed (attn_drop={layer.attn_drop.p}), and talking_heads "
                "before; build the model without attn_drop_rate"
            )
        return None

    def map_modules(self, layer: Any) -> list[str]:
        return [*super().map_modules(layer), "proj_l", "proj_w"]

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or "talking heads: the logits are those of W of all heads, mixed"


HOSTS: tuple[Host, ...] = (CaitHost(),)
