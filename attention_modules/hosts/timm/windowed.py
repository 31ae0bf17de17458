"""Attention inside windows that the block around it makes: Swin and its kin.

Each window is a sequence of its own, ``[B * windows, N, C]``. Where the windows are shifted, a mask of the block hides
the tokens that are no neighbors; timm writes it as -100, and a mechanism is given -inf, which hides them truly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.limits import SHIFTED, Limits
from attention_modules.hosts.projections import JOINT_OWN_BIASES, Widths
from attention_modules.hosts.timm.base import SwappedTimm
from attention_modules.hosts.timm.biased import BiasedHost

_HOTTEST = math.log(1.0 / 0.01)  # Swin v2's limit of the logarithm of its logit scale


def windows_bias(bias: Tensor, mask: Tensor | None, windows: int) -> Tensor:
    """The bias ``[1, H, N, N]``, with the mask ``[windows of an image, N, N]`` of shifted windows hidden in it."""
    if mask is None:
        return bias
    hidden = bias.new_zeros(mask.shape).masked_fill(mask < 0, float("-inf"))
    return bias + hidden.repeat(windows // mask.shape[0], 1, 1).unsqueeze(1)


class SwappedSwin(SwappedTimm):
    """Swin's forward."""

    masks_tokens = False

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        bias = windows_bias(self._get_rel_pos_bias(), mask, x.shape[0])
        return self._leave(self._mix(*self._split(x), bias))


class WindowHost(BiasedHost):
    """A layer that attends inside windows of a fixed size."""

    def length(self, layer: Any) -> int:
        return layer.window_size[0] * layer.window_size[1]


class ShiftedHost(WindowHost):
    """A layer whose windows are shifted in every other block."""

    def limits(self, layer: Any) -> Limits:
        return replace(super().limits(layer), sharing=SHIFTED)


class SwinHost(ShiftedHost):
    """Swin's ``WindowAttention``."""

    name = "timm swin WindowAttention"
    mixin = SwappedSwin
    library = "timm.models.swin_transformer"
    kind = "WindowAttention"


class SwappedCosine(SwappedTimm):
    """Cosine attention: queries and keys of length one, times the root of the learned scale on either side.

    So q kᵀ has the scale once, and without a query k kᵀ has it too.
    """

    masks_tokens = False

    def _cosine(self: Any, x: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v, x = self._split(x)
        root = self.logit_scale.clamp(max=_HOTTEST).div(2).exp().view(-1, 1, 1)  # [H, 1, 1]
        q, k = (None if part is None else (F.normalize(part, dim=-1) * root).type_as(v) for part in (q, k))
        return self._leave(self._mix(q, k, v, x, windows_bias(bias, mask, x.shape[0])))


class SwappedSwinV2(SwappedCosine):
    """Swin v2's forward; a network of the distances gives the bias."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = table[self.relative_position_index].permute(2, 0, 1)  # [H, N, N]
        return self._cosine(x, 16 * bias.sigmoid().unsqueeze(0), mask)


class SwinV2Host(ShiftedHost):
    """Swin v2's ``WindowAttention``."""

    name = "timm swin_v2 WindowAttention"
    mixin: ClassVar[type[Swapped]] = SwappedSwinV2
    library = "timm.models.swin_transformer_v2"
    kind = "WindowAttention"
    parts = JOINT_OWN_BIASES

    def scale(self, layer: Any) -> float:
        return 1.0

    def norm(self, layer: Any) -> str | None:
        return "cosine attention"


class SwappedSwinV2Cr(SwappedCosine):
    """The forward of Swin v2 as Christoph Reich wrote it."""

    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._cosine(x, self._relative_positional_encodings(), mask)


class SwinV2CrHost(SwinV2Host):
    """swin_transformer_v2_cr's ``WindowMultiHeadAttention``."""

    name = "timm swin_v2_cr WindowMultiHeadAttention"
    mixin = SwappedSwinV2Cr
    library = "timm.models.swin_transformer_v2_cr"
    kind = "WindowMultiHeadAttention"
    parts = BiasedHost.parts


class SwappedGcvit(SwappedTimm):
    """GC ViT's forward in its local blocks, which are given the image's query and leave it alone."""

    def forward(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        return self._leave(self._mix(*self._split(x), self.rel_pos.get_bias()))


class GcvitHost(WindowHost):
    """GC ViT's ``WindowAttentionGlobal``, where it asks with its own queries."""

    name = "timm gcvit WindowAttentionGlobal"
    mixin = SwappedGcvit
    library = "timm.models.gcvit"
    kind = "WindowAttentionGlobal"

    def unsuitable(self, layer: Any) -> str | None:
        return "its queries are the whole image's, and no projection of its tokens" if layer.use_global else None

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.head_dim, layer.head_dim, layer.num_heads)


HOSTS: tuple[Host, ...] = (SwinHost(), SwinV2Host(), SwinV2CrHost(), GcvitHost())
