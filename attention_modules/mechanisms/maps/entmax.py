"""Sparse attention by α-entmax: sparsemax (α = 2) and 1.5-entmax (Peters et al., ACL 2019)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import attend_by

ALPHAS = (1.0, 1.5, 2.0)
_FAR = 4.0  # below the largest logit: no entry so far down is in the support, whose width is at most 2


def entmax(z: Tensor, alpha: float) -> Tensor:
    """α-entmax of the last dimension, by sorting: argmax of pᵀz + the Tsallis entropy of order α over the simplex.

    Args:
        z: logits ``[..., M]``.
        alpha: 1.5 or 2.

    Returns:
        ``[..., M]``, non-negative, each row's sum 1.
    """
    z = (z - z.amax(-1, keepdim=True).detach()) * (alpha - 1)
    ordered = z.detach().sort(-1, descending=True).values
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    if alpha == 2.0:
        support = 1 + count * ordered > ordered.cumsum(-1)
        size = support.sum(-1, keepdim=True).to(z.dtype)
        inside = z >= ordered.gather(-1, support.sum(-1, keepdim=True) - 1)
        threshold = ((z * inside).sum(-1, keepdim=True) - 1) / size
        return (z - threshold).clamp(min=0.0)
    mean, square = ordered.cumsum(-1) / count, ordered.square().cumsum(-1) / count
    spread = (1 - count * (square - mean.square())) / count
    candidates = mean - spread.clamp(min=0.0).sqrt()
    size = ((candidates <= ordered) & (spread >= 0)).sum(-1, keepdim=True)
    inside = z >= ordered.gather(-1, size - 1)
    kept, total = z * inside, size.to(z.dtype)
    mean = kept.sum(-1, keepdim=True) / total
    spread = (1 - (kept.square().sum(-1, keepdim=True) - total * mean.square())) / total
    return (z - (mean - spread.clamp(min=1e-12).sqrt())).clamp(min=0.0).square()


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float = 1.5,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """α-entmax(q kᵀ · scale + mask) v (Peters, Niculae and Martins, ACL 2019; Correia et al., EMNLP 2019).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        alpha: 1 (softmax), 1.5, or 2 (sparsemax, Martins and Astudillo, ICML 2016).
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
        >>> from attnswap.functional import entmax_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> entmax_attention(q, k, v, alpha=2.0).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    if alpha == 1.0:
        return attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)

    def weights(logits: Tensor, seen: Tensor, first: int) -> Tensor:
        top = logits.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True)
        top = torch.where(top.isneginf(), logits.new_zeros(()), top).detach()
        return entmax(torch.where(seen, logits, top - _FAR / (alpha - 1)), alpha)

    return attend_by(weights, q, k, v, attn_mask, is_causal, dropout_p, scale)


@register_mechanism("entmax")
class EntmaxAttention(AttentionMechanism):
    """:func:`entmax_attention` as a mechanism, without parameters.

    Args:
        spec: the layer that it serves.
        alpha: 1 (softmax), 1.5 or 2 (sparsemax).

    Raises:
        ValueError: if ``alpha`` is none of these.
    """

    neutral: ClassVar = {"alpha": 1.0}
    softmax_like = True

    def __init__(self, spec: AttentionSpec, alpha: float = 1.5) -> None:
        super().__init__(spec)
        if alpha not in ALPHAS:
            raise ValueError(f"alpha must be 1, 1.5 or 2, got {alpha!r}")
        self.alpha = float(alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

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
        """Mix the values by sparse weights."""
        return entmax_attention(
            q, k, v, self.alpha, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale
        )
