"""Attention with rotary positions: without a query the rotated keys stand on both sides, in symmetric logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor, nn

from attention_modules.hosts.base import Host
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.projections import JOINT, JOINT_OWN_BIASES, SEPARATE, Projections, Widths
from attention_modules.hosts.timm.base import TimmHost
from attention_modules.hosts.timm.plain import SwappedMasked


class SwappedTimmAttentionRope(SwappedMasked):
    """The swapped ``AttentionRope`` and ``EvaAttention``."""

    def _rotate(self: Any, x: Tensor, rope: Tensor | None, like: Tensor) -> Tensor:
        if rope is None:
            return x
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        turned = apply_rot_embed_cat(patches, rope, half=getattr(self, "rotate_half", False))
        return torch.cat([prefix, turned], dim=2).type_as(like)

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        q, k, v, x = self._split(x)
        q = None if q is None else self._rotate(self.q_norm(q), rope, v)
        k = self._rotate(self.k_norm(k), rope, v)
        k, v = self._ungroup(k, v)
        return self._normed_gated(x, self._mix(q, k, v, x, attn_mask, is_causal))

    def _ungroup(self: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values repeated for each query head."""
        groups = self.host.groups(self)
        if groups == 1:
            return k, v
        return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


class TimmAttentionRopeHost(TimmHost):
    """``timm.layers.attention.AttentionRope``."""

    name = "timm AttentionRope"
    mixin = SwappedTimmAttentionRope
    library = "timm.layers.attention"
    kind = "AttentionRope"
    parts = JOINT

    def projections(self, layer: Any) -> Projections:
        return SEPARATE if layer.qkv is None else self.parts

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.head_dim, layer.head_dim, getattr(layer, "num_kv_heads", layer.num_heads))

    def limits(self, layer: Any) -> Limits:
        return dataclasses.replace(super().limits(layer), rotates=True)

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or "rope: the spectrum of the logits is not W's"


class EvaHost(TimmAttentionRopeHost):
    """EVA's ``EvaAttention``: no key bias, and the biases of queries and values apart."""

    name = "timm EvaAttention"
    library = "timm.models.eva"
    kind = "EvaAttention"
    parts = JOINT_OWN_BIASES


class SwappedGemma(SwappedTimmAttentionRope):
    """The swapped ``Gemma4Attention``, with rope of two axes, a value norm, and logits that are not scaled."""

    def forward(  # type: ignore[override]
        self: Any, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        from timm.models.gemma4_vit import apply_multidimensional_rope as turn  # in memory: the layer is its

        def rotate(normed: Tensor) -> Tensor:
            return turn(normed, rope_cos, rope_sin, ndim=2, unsqueeze_dim=2).transpose(1, 2)

        *heads, x = self._split(x)
        q, k, v = (None if each is None else each.transpose(1, 2) for each in heads)  # [B, N, H, d]
        q = None if q is None else rotate(self.q_norm(q))
        k, v = self._ungroup(rotate(self.k_norm(k)), self.v_norm(v).transpose(1, 2))
        return self.proj_drop(self.o_proj(self._mix(q, k, v, x, attn_mask)))


class GemmaHost(TimmHost):
    """Gemma 4's vision attention."""

    name = "timm Gemma4Attention"
    mixin = SwappedGemma
    library = "timm.models.gemma4_vit"
    kind = "Gemma4Attention"
    parts = dataclasses.replace(SEPARATE, inner="linear")

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.head_dim, layer.head_dim, layer.num_kv_heads)

    def scale(self, layer: nn.Module) -> float:
        return 1.0

    def limits(self, layer: Any) -> Limits:
        return dataclasses.replace(super().limits(layer), rotates=True)


HOSTS: tuple[Host, ...] = (TimmAttentionRopeHost(), EvaHost(), GemmaHost())
