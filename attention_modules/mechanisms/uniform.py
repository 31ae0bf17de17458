"""Attention forced uniform: the control that shows what the attention map contributes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend, check_dropout
from attention_modules.masks import combine_masks, visible
from attention_modules.mechanism import register_mechanism


def uniform_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Each row is the mean of the values that it may see, whatever queries and keys say (a control, our own).

    Of an additive mask only the hidden entries count, not its finite biases. Queries, keys and a
    learned bias receive zero gradients, so that no parameter goes unused.

    Args:
        q: queries ``[B, H, N, d]``; their number is read alone.
        k: keys ``[B, H, M, d]``; their number is read alone.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: as that of other mechanisms; it changes nothing.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError, ValueError: if the mask's dtype or shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import uniform_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> torch.allclose(uniform_attention(q, k, v)[:, :, 0], v.mean(-2), atol=1e-6)
        True
    """
    check_dropout(dropout_p)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    if attn_mask is not None:
        seen = visible(attn_mask)
        attn_mask = torch.where(seen, attn_mask * 0, float("-inf")) if attn_mask.requires_grad else seen
    return attend(q * 0, k * 0, v, attn_mask, is_causal, dropout_p, scale)


@register_mechanism("uniform")
class UniformAttention(TensorMechanism):
    """:func:`uniform_attention` as a mechanism."""

    function = staticmethod(uniform_attention)
    own_logits: ClassVar = "it looks at no query or key"
    per_head = ()
