"""Scalable-Softmax: logits grow with the logarithm of the number of keys (Nakanishi, 2025)."""

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


def ssmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(s ln(n) · q kᵀ · scale + mask) v, n the number of keys that a row sees (Nakanishi, 2025, eq. 2).

    The factor stands on the query, which is exact, and leaves the fused kernels.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        s: one number per head, ``[H]``.
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
        >>> from attnswap.functional import ssmax_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> ssmax_attention(q, k, v, torch.full((3,), 0.43)).shape
        torch.Size([1, 3, 5, 8])
    """
    if s.shape != q.shape[1:2]:
        raise ValueError(f"s must be one number per head, ({q.shape[1]},), got {tuple(s.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    factor = s.view(1, -1, 1, 1) * visible_keys(q, k, attn_mask, is_causal).log().to(s.dtype)
    return attend((q * factor).to(q.dtype), k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("ssmax")
class SSMaxAttention(TensorMechanism):
    """:func:`ssmax_attention` as a mechanism, with one learned s per head.

    Args:
        spec: the layer that it serves.
        start: value of s at the start. The paper's figures use 0.43; where training of s starts was not found (our
            reading: there). With 1 / ln n, a layer of n tokens that hides nothing starts as softmax attention.

    Raises:
        ValueError: if ``start`` is no finite number.
    """

    function = staticmethod(ssmax_attention)
    per_head = ("s",)
    own_logits: ClassVar = "it multiplies them by a learned temperature"

    def __init__(self, spec: AttentionSpec, start: float = 0.43) -> None:
        super().__init__(spec)
        self.s = nn.Parameter(torch.full((spec.num_heads,), check_number("start", start)))

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.s,)
