"""Attention forced uniform: the control that shows what the attention map contributes."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_modules.kernels import check_dropout
from attention_modules.masks import combine_masks, visible
from attention_modules.mechanism import AttentionMechanism, register_mechanism


@register_mechanism("uniform")
class UniformAttention(AttentionMechanism):
    """Each row is the mean of the values that it may see, whatever queries and keys say (a control, our own).

    Of an additive mask only the hidden entries count, not its finite biases. Queries and keys receive zero
    gradients, so that no parameter goes unused; rows with nothing visible give zeros.
    """

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
        check_dropout(dropout_p)
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
        if attn_mask is not None:
            attn_mask = visible(attn_mask)
        return scaled_dot_product_attention(q * 0, k * 0, v, attn_mask, dropout_p, is_causal, scale=scale)
