"""Attention among the pixels of a smaller image, which convolutions make before it and enlarge after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from attention_modules.hosts.base import Host
from attention_modules.hosts.projections import Projections, Widths
from attention_modules.hosts.timm.base import TimmHost
from attention_modules.hosts.timm.plain import SwappedImage


class SwappedConvolved(SwappedImage):
    """``[B, C, h, w]``; the mechanism sees the pixels of the image that ``conv_proj`` makes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if getattr(self, "small_kernels", False) and self.att_stride > 1:  # CPUBone's, which has no padding of its own
            x = F.pad(x, (0, -width % self.att_stride, 0, -height % self.att_stride))
        small = self.conv_proj(x)
        out = self._imaged(self._mix(*self._split(small)), small)
        return self.upsampling(self.o_proj(out))[..., :height, :width]


class LowformerHost(TimmHost):
    """LowFormer's ``ConvAttention``."""

    name = "timm lowformer ConvAttention"
    mixin = SwappedConvolved
    library = "timm.models.lowformer"
    kind = "ConvAttention"
    parts = Projections((("pwise", "qkv"),), by_head=True)

    def widths(self, layer: Any) -> Widths:
        return Widths(layer.num_heads, layer.head_dim, layer.head_dim, layer.num_heads)

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or "a strided convolution makes its tokens: W acts on those, not on its input"


class CpuboneHost(LowformerHost):
    """CPUBone's ``ConvAttention``."""

    name = "timm cpubone ConvAttention"
    library = "timm.models.cpubone"


HOSTS: tuple[Host, ...] = (LowformerHost(), CpuboneHost())
