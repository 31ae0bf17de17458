"""Class attention: the class token alone asks, and all tokens answer it.

To a swap it is cross-attention: it is swapped where a pattern of ``where`` spells its name.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from attention_modules.hosts.base import Host, Swapped
from attention_modules.hosts.projections import Projections
from attention_modules.hosts.timm.base import SwappedTimm, TimmHost
from attention_modules.hosts.timm.plain import QUERY_AND_PAIR, SEPARATE_SHORT


class SwappedClassToken(SwappedTimm):
    """``[B, N, C]``, whose first token is the class token; ``[B, 1, C]`` comes out."""

    def forward(self: Any, x: Tensor) -> Tensor:
        token, split = self._token(x), self.host.projections(self).split
        q, k, v = split(self, x, self.host.widths(self), asking=token, sequences=self._sequences)
        return self._leave(self._mix(q, k, v, token))

    def _token(self, x: Tensor) -> Tensor:
        """The class token as the layer projects it."""
        return x[:, :1]


class SwappedCaitToken(SwappedClassToken):
    """CaiT projects its class token without the dimension of the sequence, ``[B, C]``."""

    def _token(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def _sequences(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x


class ClassTokenHost(TimmHost):
    """CaiT's ``ClassAttn``, which is XCiT's too."""

    name = "timm cait ClassAttn"
    mixin: ClassVar[type[Swapped]] = SwappedCaitToken
    library = "timm.models.cait"
    kind = "ClassAttn"
    parts = SEPARATE_SHORT

    def is_cross(self, layer: nn.Module, parent: nn.Module | None, name: str) -> bool:
        return True


class VoloClassTokenHost(ClassTokenHost):
    """VOLO's ``ClassAttention``."""

    name = "timm volo ClassAttention"
    mixin = SwappedClassToken
    library = "timm.models.volo"
    kind = "ClassAttention"
    parts = QUERY_AND_PAIR


class CrossvitHost(ClassTokenHost):
    """CrossViT's ``CrossAttention``: the class token of one branch asks the patches of the other."""

    name = "timm crossvit CrossAttention"
    mixin = SwappedClassToken
    library = "timm.models.crossvit"
    kind = "CrossAttention"
    parts = Projections((("wq", "q"), ("wk", "k"), ("wv", "v")))


HOSTS: tuple[Host, ...] = (ClassTokenHost(), VoloClassTokenHost(), CrossvitHost())
