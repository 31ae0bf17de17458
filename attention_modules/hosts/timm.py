"""timm's ``Attention`` and ``AttentionRope``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from attention_modules.hosts.base import Host, Swapped, is_own_forward, plain_linear_refusal
from attention_modules.hosts.query import QueryPart, query_parts
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import AttentionSpec


class SwappedTimm(Swapped):
    """timm's forward, with the mechanism between the projections."""

    def _mix(self: Any, x: Tensor, q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Mechanism, gate and output projection; x ``[B, N, C]``, q, k, v ``[B, H, N, d]``."""
        out = self.mechanism(
            k if q is None else q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            scale=self.scale,
        )
        out = self.norm(out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _fused(self: Any, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """q (None where it was dropped), k, v ``[B, H, N, d]`` of the joint projection."""
        parts = self.qkv(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return (None, *parts) if len(parts) == 2 else parts


class SwappedTimmAttention(SwappedTimm):
    """The swapped ``Attention``."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self._fused(x)
        q = None if q is None else self.q_norm(q)
        return self._mix(x, q, self.k_norm(k), v, attn_mask, is_causal)


class SwappedTimmAttentionRope(SwappedTimm):
    """The swapped ``AttentionRope``."""

    def _heads(self: Any, x: Tensor, projection: nn.Module) -> Tensor:
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self: Any, x: Tensor, rope: Tensor | None, like: Tensor) -> Tensor:
        if rope is None:
            return x
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        turned = apply_rot_embed_cat(patches, rope, half=getattr(self, "rotate_half", False))
        return torch.cat([prefix, turned], dim=2).type_as(like)

    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if self.qkv is not None:
            q, k, v = self._fused(x)
        else:
            q = None if self.dropped_query else self._heads(x, self.q_proj)
            k, v = self._heads(x, self.k_proj), self._heads(x, self.v_proj)
        if q is not None:
            q = self._rotate(self.q_norm(q), rope, v)
        k = self._rotate(self.k_norm(k), rope, v)
        if self.num_kv_groups > 1:
            k, v = (part.repeat_interleave(self.num_kv_groups, dim=1) for part in (k, v))
        return self._mix(x, q, k, v, attn_mask, is_causal)


class TimmAttentionHost(Host):
    """timm's ``Attention``."""

    name = "timm Attention"
    mixin: ClassVar[type[Swapped]] = SwappedTimmAttention
    layer_class: ClassVar[type[nn.Module]] = Attention

    def understands(self, module: nn.Module) -> bool:
        return isinstance(module, self.layer_class) and is_own_forward(module, self.layer_class.forward)

    def near_miss(self, module: nn.Module) -> str | None:
        if isinstance(module, self.layer_class) and not self.understands(module):
            return f"unsupported subclass: {type(module).__name__} is a {self.name} with a forward of its own"
        return None

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        dim = layer.proj.in_features if layer.qkv is None else layer.qkv.in_features
        return AttentionSpec(dim, layer.num_heads, layer.head_dim, layer_index=layer_index)

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """Learned absolute positions fix the length, class and register tokens included."""
        model: Any = next((outer for outer in reversed(ancestors) if isinstance(outer, VisionTransformer)), None)
        if model is None or model.pos_embed is None or model.dynamic_img_size:
            return None
        return model.pos_embed.shape[1] + (model.num_prefix_tokens if model.no_embed_class else 0)

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        return query_parts(layer, "qkv", layer.attn_dim, {"weight": 0, "bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        width = layer.attn_dim
        start = 0 if getattr(layer, "dropped_query", ()) else width
        return Rows(layer.qkv, 0, width), Rows(layer.qkv, start, start + width)

    def caveat(self, layer: Any) -> str | None:
        return None if isinstance(layer.q_norm, nn.Identity) else "q/k norm: the logits do not have the spectrum of W"

    def query_refusal(self, layer: Any) -> str | None:
        if not isinstance(layer.q_norm, nn.Identity):
            return (
                "it normalises queries (q_norm), whose weights would train nothing without a query; "
                "use a mechanism with a query, or build the model with qk_norm=False"
            )
        owners = {"q_proj": nn.Linear} if layer.qkv is None else {"qkv": nn.Linear}
        return super().query_refusal(layer) or plain_linear_refusal(layer, owners)


class TimmAttentionRopeHost(TimmAttentionHost):
    """timm's ``AttentionRope``; without a query the rotated keys stand on both sides, so the logits are symmetric."""

    name = "timm AttentionRope"
    mixin = SwappedTimmAttentionRope
    layer_class = AttentionRope

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        projection = layer.k_proj if layer.qkv is None else layer.qkv
        return AttentionSpec(projection.in_features, layer.num_heads, layer.head_dim, layer_index=layer_index)

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        if layer.qkv is not None:
            return super().query_parts(layer)
        return query_parts(layer, "q_proj", layer.attn_dim, {"weight": 0, "bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        if layer.qkv is not None:
            return super().qk_rows(layer)
        return Rows(layer.q_proj, 0, layer.attn_dim), Rows(layer.k_proj, 0, layer.kv_dim)

    def groups(self, layer: Any) -> int:
        return layer.num_kv_groups

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or "rope: the spectrum of the logits is not W's"


HOSTS: tuple[Host, ...] = (TimmAttentionHost(), TimmAttentionRopeHost())
