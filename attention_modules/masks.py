"""Attention masks: one reading of boolean, additive and causal masks for every mechanism."""

from __future__ import annotations

import torch
from torch import Tensor

# Additive masks are written with -inf, the lowest number of a dtype, -1e9 or -1e4, which bfloat16 rounds to -9,984; exp
# of each is zero. An integer: with dynamic=True, torch.compile cannot read a module's float in a part that is computed
# again in the backward pass.
HIDDEN = -9984


def check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Check that a mask is boolean or floating and broadcasts to ``[B, H, N, M]``.

    Raises:
        TypeError: if the mask is neither boolean nor floating.
        ValueError: if its shape does not broadcast.
    """
    if attn_mask is None:
        return
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask must be boolean (True = may be seen) or floating (added to the logits), got {attn_mask.dtype}; "
            "call .bool() on a 0/1 mask"
        )
    full = (*q.shape[:-1], k.shape[-2])
    size = tuple(attn_mask.shape)
    last = full[-len(size) :] if size else ()
    # No `m in (1, f)`, which torch 2.9 cannot compile with free sizes.
    fits = len(size) <= len(full) and all(m == 1 or m == f for m, f in zip(size, last, strict=True))
    if not fits:
        raise ValueError(
            f"attn_mask of shape {size} does not broadcast to [batch, heads, queries, keys] = {full}; "
            "a padding mask [batch, keys] goes in as mask[:, None, None, :]"
        )


def check_causal(is_causal: bool, q: Tensor, k: Tensor) -> None:
    """Check that ``is_causal`` has one meaning: as many queries as keys.

    Raises:
        ValueError: if it is set for different numbers of queries and keys.
    """
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"is_causal needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}; "
            "pass attn_mask that says which keys each query may see"
        )


def combine_masks(
    attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor, scale: float | None = None
) -> tuple[Tensor | None, bool]:
    """Check a mask and fold ``is_causal`` into it where both are given, or where ``scale`` is not positive.

    Args:
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        scale: factor on the logits. PyTorch's CPU kernel multiplies the -inf of ``is_causal`` by it, which is NaN for 0
            and visible for less: there causality becomes a mask.

    Returns:
        The mask, ``[B|1, H|1, N|1, M|1]``, and what is left of ``is_causal``: never both.

    Raises:
        TypeError, ValueError: as :func:`check_mask` and :func:`check_causal`.
    """
    check_mask(attn_mask, q, k)
    check_causal(is_causal, q, k)
    if attn_mask is None:
        if not is_causal or scale is None or scale > 0:
            return None, is_causal
        attn_mask = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    # PyTorch's fused attention takes two or four dimensions, and leaves three to its slow form.
    attn_mask = attn_mask.view((1,) * (q.dim() - attn_mask.dim()) + tuple(attn_mask.shape))
    if not is_causal:
        return attn_mask, False
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if attn_mask.dtype == torch.bool:
        return attn_mask & past, False
    return attn_mask.masked_fill(~past, float("-inf")), False


def hide(attn_mask: Tensor | None) -> Tensor | None:
    """An additive mask with -inf wherever it hides, so that a row with nothing visible gives zeros."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask
    return attn_mask.masked_fill(attn_mask <= HIDDEN, float("-inf"))


def visible(attn_mask: Tensor) -> Tensor:
    """Which keys a mask lets each row see, boolean, in the mask's shape.

    The one rule for mechanisms and statistics (our reading): True, or a bias above -9,984 (-1e4 in bfloat16).
    """
    return attn_mask if attn_mask.dtype == torch.bool else ~(attn_mask <= HIDDEN)  # NaN is seen
