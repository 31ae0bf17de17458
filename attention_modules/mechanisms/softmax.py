"""Plain softmax attention, the neutral element of swapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import attend, check_dropout
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionMechanism, register_mechanism


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, as PyTorch computes it (Vaswani et al., 2017, eq. 1).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only; together with ``attn_mask``, what both let it see.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask is neither boolean nor floating.
        ValueError: if its shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import softmax_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.equal(softmax_attention(q, k, v), expected)
        True
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    return attend(q, k, v, attn_mask, is_causal, dropout_p, scale)


@register_mechanism("softmax")
class SoftmaxAttention(AttentionMechanism):
    """:func:`softmax_attention` as a mechanism.

    A row that a boolean mask or -inf hides wholly gives zeros; one hidden by finite numbers averages, as in PyTorch.
    """

    gives_weights: ClassVar[bool] = True
    softmax_like = True
    per_head = ()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        weights: list[Tensor] | None = None,
        plain: Callable[..., Tensor | None] | None = None,
    ) -> Tensor:
        """Mix the values; ``attn_mask`` and ``is_causal`` may come together.

        Where ``weights`` is a list, the map ``[B, H, N, M]`` is made, after dropout as in nn.MultiheadAttention, and
        added to it. Where ``plain`` is given, and has an output for these q, k and v, that is it.

        Raises:
            TypeError: if the mask is neither boolean nor floating.
            ValueError: if its shape does not fit, or ``is_causal`` meets a key-value cache.
        """
        if plain is not None and (out := plain(q, k, v)) is not None:
            return out
        if weights is None:
            return softmax_attention(
                q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale
            )
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
        if is_causal:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        weights.append(_map(q, k, attn_mask, dropout_p, scale))
        return torch.bmm(weights[-1].flatten(0, 1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def _map(q: Tensor, k: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float | None) -> Tensor:
    """The attention map ``[B, H, N, M]``, by the very steps of nn.MultiheadAttention, so that it has the same bits."""
    check_dropout(dropout_p)
    q = q * (math.sqrt(1.0 / float(q.shape[-1])) if scale is None else scale)
    queries, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1)
    if attn_mask is None:
        logits = torch.matmul(q, k.transpose(-2, -1)).flatten(0, 1)  # as others do whose keys have another layout
        hidden = None
    else:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        full = attn_mask.to(q.dtype).expand(*q.shape[:2], -1, -1).flatten(0, 1)
        logits = torch.baddbmm(full, queries, keys)
        hidden = logits.isneginf().all(-1, keepdim=True)  # a row that sees nothing gives zeros
        logits = logits.masked_fill(hidden, 0.0)
    found = F.softmax(logits, dim=-1)
    if hidden is not None:
        found = found.masked_fill(hidden, 0.0)
    if dropout_p > 0.0:
        found = F.dropout(found, dropout_p)
    return found.unflatten(0, q.shape[:2])
