"""Hard retrieval attention: each row reads one value, that of its largest logit (Xu and van Genabith, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.shared.chunks import attend_by


def _one_hot(logits: Tensor, seen: Tensor, first: int) -> Tensor:
    value, place = logits.masked_fill(~seen, float("-inf")).max(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, place, torch.where(value.isnan(), value, 1.0))


def hard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """One-hot weights at each row's largest logit, with the gradient of softmax (straight-through).

    Weights one_hot(z) + A - stop_gradient(A), A = softmax(z): the paper's own gradient was not found (our reading).
    Derivatives of second order are those of q and k at fixed v: A reads v detached.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: dropout of the one-hot weights.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import hard_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> hard_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    out = attend_by(_one_hot, q.detach(), k.detach(), v, attn_mask, is_causal, dropout_p, scale)
    if not torch.is_grad_enabled():
        return out
    soft = attend(q, k, v.detach(), hide(attn_mask), is_causal, 0.0, scale)
    return out + (soft - soft.detach()).to(out.dtype)


@register_mechanism("hard")
class HardAttention(TensorMechanism):
    """:func:`hard_attention` as a mechanism, without parameters."""

    function = staticmethod(hard_attention)
    surrogate_gradient = True
    softmax_like = True
    per_head = ()
