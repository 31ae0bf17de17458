"""Selective self-attention: a temperature that falls with a token's position (Zhang et al., NeurIPS 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.options import check_number
from attention_modules.mechanisms.shared.visible_keys import visible_keys

_LARGEST_BETA = 8  # e^(-e^8) is below what float64 holds, and float16 holds e^8


def ssa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax((1 + e^(-e^β) ln n) · q kᵀ · scale + mask) v, n the number of keys that a row sees.

    The part of selective self-attention (Zhang et al., NeurIPS 2024) that depends on the position, as their released
    code has it; their part that depends on the token was not found there, and is left out. n is the row's position
    where attention is causal; elsewhere, the number of visible keys (our reading).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        beta: β, one number per head, ``[H]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import ssa_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> ssa_attention(q, k, v, torch.full((3,), 2.0)).shape
        torch.Size([1, 3, 5, 8])
    """
    if beta.shape != q.shape[1:2]:
        raise ValueError(f"beta must be one number per head, ({q.shape[1]},), got {tuple(beta.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    # Above the limit growth is 0 in every precision, and e^β may be infinite, whose gradient would be NaN.
    growth = beta.clamp(max=_LARGEST_BETA).exp().neg().exp().view(1, -1, 1, 1)
    factor = 1 + growth * visible_keys(q, k, attn_mask, is_causal).log().to(beta.dtype)
    return attend((q * factor).to(q.dtype), k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("ssa")
class SelectiveAttention(TensorMechanism):
    """:func:`ssa_attention` as a mechanism, with one learned β per head.

    Args:
        spec: the layer that it serves.
        start: value of β at the start, 2 as released; 6 and more is softmax attention.

    Raises:
        ValueError: if ``start`` is no finite number.
    """

    function = staticmethod(ssa_attention)
    per_head = ("beta",)
    neutral: ClassVar = {"start": 6.0}
    own_logits: ClassVar = "it multiplies them by a learned temperature"

    def __init__(self, spec: AttentionSpec, start: float = 2.0) -> None:
        super().__init__(spec)
        self.beta = nn.Parameter(torch.full((spec.num_heads,), check_number("start", start)))

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.beta,)
