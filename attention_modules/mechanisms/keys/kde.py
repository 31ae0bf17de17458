"""Attention as kernel density estimation with normalized keys (Han et al., 2022), a baseline of RPC-Attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import register_mechanism


def kde_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k̂‖² · scale + mask) v, k̂ the keys of norm 1 (the kernel form of Han et al., 2022, released code).

    ‖q‖² and ‖k̂‖² are one number per row, so that this is attention with k̂ at twice the scale.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the squared distances, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import kde_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> kde_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, normalized(k), v, hide(attn_mask), is_causal, dropout_p, 2 * scale)


def normalized(k: Tensor) -> Tensor:
    """Keys of length one; zeros stay zeros. In float32 at least: float16 holds neither 1e-12 nor the length of many."""
    return F.normalize(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1).to(k.dtype)


@register_mechanism("kde")
class KDEAttention(TensorMechanism):
    """:func:`kde_attention` as a mechanism, without parameters."""

    function = staticmethod(kde_attention)
    per_head = ()
    own_logits: ClassVar = "they are squared distances of queries and normalized keys"
