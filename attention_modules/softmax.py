"""Plain softmax attention, the neutral element of swapping."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
