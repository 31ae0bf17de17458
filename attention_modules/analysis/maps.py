"""Attention maps themselves, for looking at: chosen rows of softmax(q kᵀ), and their rollout over layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_modules.masks import combine_masks
from attention_modules.mechanisms.shared.acting import FactorMap, softmax_rows


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Rows of softmax(scale · q kᵀ + mask) in fp32; zeros in rows that see nothing, NaN where q or k are.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.
        rows: numbers of the queries wanted, integer ``[R]``; all where None.

    Returns:
        ``[B, H, R, M]``.

    Raises:
        TypeError, ValueError: as :func:`attention_modules.masks.combine_masks`.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_map
        >>> attention_map(q, k, is_causal=True).sum(-1).round(decimals=4).unique()
        tensor([1.])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
    rows = torch.arange(q.shape[2], device=q.device) if rows is None else rows
    return softmax_rows(FactorMap(q, k, attn_mask, is_causal, scale), rows)


def attention_rollout(maps: Sequence[Tensor]) -> Tensor:
    """Π_l (A_l + I)/2, the last layer leftmost: how much of each input token is in each token after all layers.

    Attention rollout of Abnar and Zuidema (Quantifying Attention Flow in Transformers, ACL 2020): the identity stands
    for the residual connection.

    Args:
        maps: of each layer, first to last, means over heads, ``[B, N, N]``.

    Returns:
        ``[B, N, N]``.

    Raises:
        ValueError: if there are none, or they are not square and of one shape.

    Example:
        >>> import torch
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> from attnswap.analysis import attention_map, attention_rollout
        >>> attention_rollout([attention_map(q, k).mean(1), attention_map(k, q).mean(1)]).shape
        torch.Size([1, 5, 5])
    """
    shapes = {tuple(one.shape) for one in maps}
    if len(shapes) != 1 or maps[0].ndim != 3 or maps[0].shape[1] != maps[0].shape[2]:
        raise ValueError(f"rollout needs square maps [B, N, N] of one shape, got {sorted(shapes)}")
    rolled = torch.eye(maps[0].shape[1], dtype=maps[0].dtype, device=maps[0].device).expand_as(maps[0])
    for one in maps:
        rolled = (one @ rolled + rolled) / 2
    return rolled
