"""Twicing attention: what smoothing has removed is smoothed again and added (Abdullaev and Nguyen, ICLR 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.symmetric import check_self_attention


def twicing_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """(2A - A²) v, A = softmax(q kᵀ · scale + mask) (twicing attention, Abdullaev and Nguyen, ICLR 2025).

    Two passes of fused attention: 2 A v - A (A v).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout; each pass drops weights of its own.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or there is not one query for each key.

    Example:
        >>> import torch
        >>> from attnswap.functional import twicing_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> twicing_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    check_self_attention("twicing", q, k)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    attn_mask = hide(attn_mask)
    once = attend(q, k, v, attn_mask, is_causal, dropout_p, scale)
    twice = attend(q, k, once, attn_mask, is_causal, dropout_p, scale)
    return torch.lerp(twice, once, 2.0)  # 2 A v - A (A v), in one operation


@register_mechanism("twicing")
class TwicingAttention(TensorMechanism):
    """:func:`twicing_attention` as a mechanism, without parameters."""

    function = staticmethod(twicing_attention)
    one_query_per_key = True
    per_head = ()
