"""Plain softmax attention, the neutral element of swapping."""

from __future__ import annotations

from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionMechanism, register_mechanism


@register_mechanism("softmax")
class SoftmaxAttention(AttentionMechanism):
    """softmax(q kᵀ · scale + mask) v, as PyTorch computes it (Vaswani et al., 2017, eq. 1)."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
        return attend(q, k, v, attn_mask, is_causal, dropout_p, scale)
