"""Class attention: the class token alone asks, and all tokens answer it.

To a swap it is cross-attention: it is swapped where a pattern of ``where`` spells its name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attention_modules.hosts.base import Host
from attention_modules.hosts.projections import Projections
from attention_modules.hosts.timm.base import SwappedTimm, TimmHost
from attention_modules.hosts.timm.plain import QUERY_AND_PAIR, SEPARATE_SHORT


class SwappedClassToken(SwappedTimm):
    """``[B, N, C]``, whose first token is the class token; ``[B, 1, C]`` comes out."""

    def forward(self: Any, x: Tensor) -> Tensor:
        token = x[:, :1]
        q, k, v = self.host.projections(self).split(self, x, self.host.widths(self), asking=token)
        return self._leave(self._mix(q, k, v, token))


class ClassTokenHost(TimmHost):
    """CaiT's ``ClassAttn``, which is XCiT's too."""

    name = "timm cait ClassAttn"
    mixin = SwappedClassToken
    library = "timm.models.cait"
    kind = "ClassAttn"
    parts = SEPARATE_SHORT

    def is_cross(self, layer: nn.Module, parent: nn.Module | None, name: str) -> bool:
        return True


class VoloClassTokenHost(ClassTokenHost):
    """VOLO's ``ClassAttention``."""

    name = "timm volo ClassAttention"
    library = "timm.models.volo"
    kind = "ClassAttention"
    parts = QUERY_AND_PAIR


class CrossvitHost(ClassTokenHost):
    """CrossViT's ``CrossAttention``: the class token of one branch asks the patches of the other."""

    name = "timm crossvit CrossAttention"
    library = "timm.models.crossvit"
    kind = "CrossAttention"
    parts = Projections((("wq", "q"), ("wk", "k"), ("wv", "v")))


HOSTS: tuple[Host, ...] = (ClassTokenHost(), VoloClassTokenHost(), CrossvitHost())
