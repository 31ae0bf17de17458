"""softmax(q kᵀ · scale) v over all tokens, in the layouts that timm's models keep their tokens in."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.projections import Projections, Widths
from attention_modules.hosts.timm.base import SwappedTimm, TimmHost

QUERY_AND_PAIR = Projections((("q", "q"), ("kv", "kv")))
PAIR_AND_VALUE = Projections((("qk", "qk"), ("v", "v")))
SEPARATE_SHORT = Projections((("q", "q"), ("k", "k"), ("v", "v")))


class SwappedMasked(SwappedTimm):
    """Tokens with a mask, a norm of the output and a gate, as in ``timm.layers.attention``."""

    def _normed_gated(self: Any, x: Tensor, out: Tensor) -> Tensor:
        out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self._leave(out)


class SwappedTimmAttention(SwappedMasked):
    """The swapped ``Attention``."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v, x = self._split(x)
        q = None if q is None else self.q_norm(q)
        return self._normed_gated(x, self._mix(q, self.k_norm(k), v, x, attn_mask, is_causal))


class TimmAttentionHost(TimmHost):
    """``timm.layers.attention.Attention``: vision_transformer, deit, naflexvit, hybrid, vitamin, pit, crossvit, ..."""

    name = "timm Attention"
    mixin: ClassVar[type[Swapped]] = SwappedTimmAttention
    library = "timm.layers.attention"


class SwappedTokens(SwappedTimm):
    """``[B, N, C]``; what else the forward is given tells the size of the image."""

    def forward(self: Any, x: Tensor, *size: object) -> Tensor:
        return self._leave(self._mix(*self._split(x)))


class MetaformerHost(TimmHost):
    """metaformer's ``Attention``."""

    name = "timm metaformer Attention"
    mixin = SwappedTokens
    library = "timm.models.metaformer"


class ConvitHost(TimmHost):
    """ConViT's ``MHSA``, its last blocks."""

    name = "timm convit MHSA"
    mixin = SwappedTokens
    library = "timm.models.convit"
    kind = "MHSA"


class DavitHost(TimmHost):
    """DaViT's ``WindowAttention``; the windows are made outside."""

    name = "timm davit WindowAttention"
    mixin = SwappedTokens
    library = "timm.models.davit"
    kind = "WindowAttention"


class TntHost(TimmHost):
    """TNT's ``Attention``: queries and keys in one projection, values in another."""

    name = "timm tnt Attention"
    mixin = SwappedTokens
    library = "timm.models.tnt"
    parts = PAIR_AND_VALUE

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.head_dim, self.value_width(layer) // layer.num_heads, layer.num_heads)


class _ReducedHost(TimmHost):
    """Attention that may reduce its keys before it projects them, and is self-attention only where it does not."""

    mixin = SwappedTokens
    parts = QUERY_AND_PAIR

    def unsuitable(self, layer: Any) -> str | None:
        if layer.sr is None:
            return None
        return "its keys come from a reduced image: more queries than keys, so it is no attention among the same tokens"


class PvtHost(_ReducedHost):
    """PVT v2's ``Attention`` without reduction: the last stage."""

    name = "timm pvt_v2 Attention"
    library = "timm.models.pvt_v2"


class TwinsGlobalHost(_ReducedHost):
    """Twins' ``GlobalSubSampleAttn`` without reduction: the last stage."""

    name = "timm twins GlobalSubSampleAttn"
    library = "timm.models.twins"
    kind = "GlobalSubSampleAttn"


class NextvitHost(_ReducedHost):
    """NextViT's ``EfficientAttention`` without reduction: the last stage."""

    name = "timm nextvit EfficientAttention"
    library = "timm.models.nextvit"
    kind = "EfficientAttention"
    parts = SEPARATE_SHORT


class SwappedBlocks(SwappedTokens):
    """NesT's ``[B, T, N, C]``: attention inside each of T blocks."""

    def _sequences(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def _arranged(self: Any, out: Tensor, x: Tensor) -> Tensor:
        heads_last = out.unflatten(-1, (self.num_heads, -1)).transpose(-1, -2)  # as timm hands them to the projection
        return heads_last.flatten(-2).unflatten(0, x.shape[:2])

    def _dropped(self: Any, weights: Tensor, x: Tensor) -> Tensor:
        plain = weights.unflatten(0, x.shape[:2]).transpose(1, 2)  # [B, H, T, N, N]
        return self.attn_drop(plain.contiguous()).transpose(1, 2).flatten(0, 1)  # dropout draws in the order of memory


class NestHost(TimmHost):
    """NesT's ``Attention``."""

    name = "timm nest Attention"
    mixin = SwappedBlocks
    library = "timm.models.nest"


class SwappedGrid(SwappedTokens):
    """``[B, ..., C]``: attention among all tokens of a sample."""

    def _sequences(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2)

    def _arranged(self, out: Tensor, x: Tensor) -> Tensor:
        return out.unflatten(1, x.shape[1:-1])


class VoloHost(TimmHost):
    """VOLO's ``Attention``, the stages after the outlooker."""

    name = "timm volo Attention"
    mixin = SwappedGrid
    library = "timm.models.volo"


class Sam2Host(TimmHost):
    """Hieradet's ``MultiScaleAttention``, where it does not pool its queries."""

    name = "timm hieradet_sam2 MultiScaleAttention"
    mixin = SwappedGrid
    library = "timm.models.hieradet_sam2"
    kind = "MultiScaleAttention"

    def unsuitable(self, layer: Any) -> str | None:
        return None if layer.q_pool is None else POOLED_QUERIES


POOLED_QUERIES = "it pools its queries: fewer queries than keys, so it is no attention among the same tokens"


class SwappedUnits(SwappedTokens):
    """Hiera's ``[B, N, C]``, attention among all tokens or inside mask units, whose tokens are strided."""

    def _sequences(self: Any, x: Tensor) -> Tensor:
        if not self.use_mask_unit_attn:
            return x
        return x.unflatten(1, (self.window_size, -1)).transpose(1, 2).flatten(0, 1)

    def _arranged(self: Any, out: Tensor, x: Tensor) -> Tensor:
        if not self.use_mask_unit_attn:
            return out
        return out.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(1, 2)


class HieraHost(TimmHost):
    """Hiera's ``MaskUnitAttention``, where it does not pool its queries."""

    name = "timm hiera MaskUnitAttention"
    mixin = SwappedUnits
    library = "timm.models.hiera"
    kind = "MaskUnitAttention"

    def unsuitable(self, layer: Any) -> str | None:
        return None if layer.q_stride == 1 else POOLED_QUERIES

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.heads, layer.head_dim, layer.head_dim, layer.heads)


class SwappedPartition(SwappedTokens):
    """Twins' ``[B, h * w, C]``, attention inside windows of ``ws`` by ``ws``, padded with zeros."""

    def forward(self: Any, x: Tensor, *size: Any) -> Tensor:
        (height, width), side = size[0], self.ws
        image = x.unflatten(1, (height, width))
        image = nn.functional.pad(image, (0, 0, 0, -width % side, 0, -height % side))
        cut = image.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)  # [B, rows, columns, ws, ws, C]
        out = self._mix(*self._split(cut)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return self._leave(out[:, :height, :width].flatten(1, 2))

    def _sequences(self, x: Tensor) -> Tensor:
        return x.flatten(3, 4).flatten(0, 2)

    def _arranged(self, out: Tensor, x: Tensor) -> Tensor:
        return out.unflatten(1, x.shape[3:5]).unflatten(0, x.shape[:3])

    def _dropped(self: Any, weights: Tensor, x: Tensor) -> Tensor:
        return self.attn_drop(weights.unflatten(0, (x.shape[0], -1))).flatten(0, 1)  # [B, windows, H, N, N]


class TwinsLocalHost(TimmHost):
    """Twins' ``LocallyGroupedAttn``."""

    name = "timm twins LocallyGroupedAttn"
    mixin = SwappedPartition
    library = "timm.models.twins"
    kind = "LocallyGroupedAttn"


class SwappedImage(SwappedTimm):
    """``[B, C, h, w]``; projections are 1 x 1 convolutions."""

    def _split(self: Any, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """q, k, v contiguous as timm makes them, features last, which fused attention asks for; and the tokens."""
        q, k, v, x = super()._split(x)
        if x.dim() != 4:
            return q, k, v, x
        return None if q is None else q.contiguous(), k.contiguous(), v.contiguous(), x.flatten(2).transpose(1, 2)

    def _imaged(self: Any, out: Tensor, x: Tensor) -> Tensor:
        """``[B, C, h, w]`` of ``[B, N, C]``, contiguous as timm makes it: the dropout after it goes by the layout."""
        return out.transpose(1, 2).contiguous().unflatten(2, x.shape[2:])

    def forward(self: Any, x: Tensor) -> Tensor:
        return self._leave(self._imaged(self._mix(*self._split(x)), x))


class VisformerHost(TimmHost):
    """Visformer's ``Attention``."""

    name = "timm visformer Attention"
    mixin = SwappedImage
    library = "timm.models.visformer"

    def value_width(self, layer: Any) -> int:
        return layer.num_heads * layer.head_dim


class SwappedFlattened(SwappedImage):
    """``[B, C, h, w]``; projections are linear."""

    def forward(self: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self._leave(self._mix(*self._split(tokens))).transpose(1, 2).unflatten(2, x.shape[2:])


class FastvitHost(TimmHost):
    """FastViT's ``Attention``."""

    name = "timm fastvit Attention"
    mixin = SwappedFlattened
    library = "timm.models.fastvit"


HOSTS: tuple[Host, ...] = (
    TimmAttentionHost(),
    MetaformerHost(),
    ConvitHost(),
    DavitHost(),
    TntHost(),
    PvtHost(),
    TwinsGlobalHost(),
    NextvitHost(),
    NestHost(),
    VoloHost(),
    Sam2Host(),
    HieraHost(),
    TwinsLocalHost(),
    VisformerHost(),
    FastvitHost(),
)
