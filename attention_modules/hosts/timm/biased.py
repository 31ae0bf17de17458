"""Attention with a relative position bias, which is added to the logits whatever the mechanism.

Without a query the logits are k kᵀ · scale plus the bias: as symmetric as the bias is, which need not be at all.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.projections import JOINT, JOINT_BY_HEAD, JOINT_OWN_BIASES, Projections, Widths
from attention_modules.hosts.timm.base import SwappedTimm, TimmHost
from attention_modules.hosts.timm.plain import SwappedGrid, SwappedImage

QUERY_BIAS = "its relative position bias is a product with the query: without a query there is no bias"


def added(*biases: Tensor | None) -> Tensor | None:
    """The sum of those that are there."""
    there = [bias for bias in biases if bias is not None]
    return sum(there[1:], there[0]) if there else None


class BiasedHost(TimmHost):
    """A layer whose logits have a bias."""

    def biased(self, layer: Any) -> bool:
        """Whether this layer has one."""
        return True

    def limits(self, layer: Any) -> Limits:
        found = super().limits(layer)
        if not self.biased(layer):
            return found
        return dataclasses.replace(
            found,
            without_rows="its relative position bias differs from row to row, and this mechanism takes one number per "
            "key alone, as padding gives it; choose another mechanism",
        )

    def caveat(self, layer: Any) -> str | None:
        bias = "relative position bias: the logits are those of W plus the bias" if self.biased(layer) else None
        return super().caveat(layer) or bias


class SwappedBeit(SwappedTimm):
    """BEiT's ``[B, N, C]``, the class token among them."""

    def forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        own = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        return self._leave(self._mix(*self._split(x), added(own, shared_rel_pos_bias)))


class BeitHost(BiasedHost):
    """BEiT's ``Attention``."""

    name = "timm beit Attention"
    mixin = SwappedBeit
    library = "timm.models.beit"
    parts = JOINT_OWN_BIASES

    def length(self, layer: Any) -> int | None:
        return None if layer.window_size is None else layer.window_size[0] * layer.window_size[1] + 1


class SwappedRelPos(SwappedTimm):
    """vision_transformer_relpos' ``[B, N, C]``."""

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        q, k, v, x = self._split(x)
        q = None if q is None else self.q_norm(q)
        return self._leave(self._mix(q, self.k_norm(k), v, x, _module_bias(self, shared_rel_pos)))


def _module_bias(layer: Any, shared: Tensor | None) -> Tensor | None:
    """The bias of the layer's own module, else the one that layers share."""
    return shared if layer.rel_pos is None else layer.rel_pos.get_bias()


class RelPosHost(BiasedHost):
    """vision_transformer_relpos' ``RelPosAttention``."""

    name = "timm RelPosAttention"
    mixin = SwappedRelPos
    library = "timm.models.vision_transformer_relpos"
    kind = "RelPosAttention"


class SwappedSam(SwappedTimm):
    """SAM's ``[B, h, w, C]``: the bias is a product of the query and learned positions; or rope, or neither."""

    def forward(self: Any, x: Tensor) -> Tensor:
        from timm.models import vision_transformer_sam as sam  # in memory: the layer is its

        height, width = x.shape[1:3]
        q, k, v, tokens = self._split(x.flatten(1, 2))
        # timm's norms and dropout are given the heads as samples.
        q = None if q is None else self.q_norm(q.flatten(0, 1)).unflatten(0, q.shape[:2])
        k, bias = self.k_norm(k.flatten(0, 1)).unflatten(0, k.shape[:2]), None
        if self.use_rel_pos and q is not None:
            size = (height, width)
            bias = sam.get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, q.shape[:2])
        elif self.rope is not None:
            rope = self.rope.get_embed()
            q = None if q is None else sam.apply_rot_embed_cat(q, rope).type_as(v)
            k = sam.apply_rot_embed_cat(k, rope).type_as(v)
        return self._leave(self._mix(q, k, v, tokens, bias)).unflatten(1, (height, width))

    def _dropped(self: Any, weights: Tensor, x: Tensor) -> Tensor:
        return self.attn_drop(weights.flatten(0, 1)).unflatten(0, weights.shape[:2])


class SamHost(BiasedHost):
    """SAM's ``Attention``."""

    name = "timm sam Attention"
    mixin = SwappedSam
    library = "timm.models.vision_transformer_sam"

    def biased(self, layer: Any) -> bool:
        return layer.use_rel_pos

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or ("rope: the spectrum of the logits is not W's" if layer.rope else None)

    def limits(self, layer: Any) -> Limits:
        found = super().limits(layer)
        if layer.use_rel_pos:
            return dataclasses.replace(found, without_query=QUERY_BIAS)
        return dataclasses.replace(found, rotates=layer.rope is not None)


class SwappedBottleneck(SwappedImage):
    """BoTNet's ``[B, C, h, w]``: the bias is a product of the query and learned positions; a pooling comes after."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v, tokens = self._split(x)
        bias = self.pos_embed(q.flatten(0, 1)).unflatten(0, q.shape[:2])
        bias = bias * self.scale if self.scale_pos_embed else bias
        return self.pool(self._imaged(self._mix(q, k, v, tokens, bias), x))


class BottleneckHost(BiasedHost):
    """BoTNet's ``BottleneckAttn``."""

    name = "timm BottleneckAttn"
    mixin = SwappedBottleneck
    library = "timm.layers.bottleneck_attn"
    kind = "BottleneckAttn"

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.dim_head_qk, layer.dim_head_v, layer.num_heads)

    def length(self, layer: Any) -> int:
        return int(layer.pos_embed.height * layer.pos_embed.width)

    def limits(self, layer: Any) -> Limits:
        return dataclasses.replace(super().limits(layer), without_query=QUERY_BIAS)


class SwappedMaxxImage(SwappedImage):
    """MaxxViT's ``[B, C, h, w]``."""

    def forward(self: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        out = self._mix(*self._split(x), _module_bias(self, shared_rel_pos))
        return self._leave(self._imaged(out, x))


class MaxxImageHost(BiasedHost):
    """MaxxViT's ``Attention2d``."""

    name = "timm maxxvit Attention2d"
    mixin: ClassVar[type[Swapped]] = SwappedMaxxImage
    library = "timm.models.maxxvit"
    kind = "Attention2d"

    def projections(self, layer: Any) -> Projections:
        return JOINT_BY_HEAD if layer.head_first else JOINT

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.dim_head, layer.dim_head, layer.num_heads)


class SwappedMaxxTokens(SwappedGrid):
    """MaxxViT's ``[B, ..., C]``, windows and grids made outside."""

    def forward(  # type: ignore[override]
        self: Any, x: Tensor, shared_rel_pos: Tensor | None = None
    ) -> Tensor:
        return self._leave(self._mix(*self._split(x), _module_bias(self, shared_rel_pos)))


class MaxxTokensHost(MaxxImageHost):
    """MaxxViT's ``AttentionCl``."""

    name = "timm maxxvit AttentionCl"
    mixin = SwappedMaxxTokens
    kind = "AttentionCl"


class SwappedLevit(SwappedImage):
    """LeViT's ``[B, N, C]``, or ``[B, C, h, w]`` with convolutions; values are wider than keys."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self._mix(*self._split(x), self.get_attention_biases(x.device))
        return self._leave(self._imaged(out, x) if self.use_conv else out)


class _CachedBiasHost(BiasedHost):
    """Each head has its query, key and value together; the values have a width of their own."""

    parts = JOINT_BY_HEAD

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.key_dim, layer.val_dim, layer.num_heads)


class LevitHost(_CachedBiasHost):
    """LeViT's ``Attention``."""

    name = "timm levit Attention"
    mixin = SwappedLevit
    library = "timm.models.levit"

    def projections(self, layer: Any) -> Projections:
        return JOINT_BY_HEAD if _is_folded(layer) else dataclasses.replace(JOINT_BY_HEAD, inner="linear")

    def limits(self, layer: Any) -> Limits:
        norm = "a batch norm follows its joint projection, whose statistics cannot be split between query and keys"
        return dataclasses.replace(super().limits(layer), without_query=None if _is_folded(layer) else norm)

    def weights_refusal(self, layer: Any) -> str | None:
        if _is_folded(layer):
            return None
        return "a batch norm lies between the projection and the logits, so W depends on the batch"


def _is_folded(layer: Any) -> bool:
    """Whether timm's ``reparameterize_model`` has folded a layer's batch norms."""
    return not hasattr(layer.qkv, "linear")


class SwappedTiny(SwappedTimm):
    """TinyViT's ``[B, N, C]``, which it normalizes first."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self._leave(self._mix(*self._split(self.norm(x)), self.get_attention_biases(x.device)))


class TinyHost(_CachedBiasHost):
    """TinyViT's ``Attention``."""

    name = "timm tiny_vit Attention"
    mixin = SwappedTiny
    library = "timm.models.tiny_vit"


class SwappedEfficientformer(SwappedTimm):
    """EfficientFormer's ``[B, N, C]``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self._leave(self._mix(*self._split(x), self.get_attention_biases(x.device)))


class EfficientformerHost(_CachedBiasHost):
    """EfficientFormer's ``Attention``."""

    name = "timm efficientformer Attention"
    mixin = SwappedEfficientformer
    library = "timm.models.efficientformer"


HOSTS: tuple[Host, ...] = (
    BeitHost(),
    RelPosHost(),
    SamHost(),
    BottleneckHost(),
    MaxxImageHost(),
    MaxxTokensHost(),
    LevitHost(),
    TinyHost(),
    EfficientformerHost(),
)
