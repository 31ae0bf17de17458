"""Mechanisms that change what softmax attention gives."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.naive.common import naive_logits, naive_map


def naive_twicing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(2A - A²) v."""
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return (2 * a - a @ a) @ v


def naive_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A v ⊙ σ(gate)."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v / (1 + (-gate).exp())


def naive_differential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    pairs: str = "features",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(A₁ - λ A₂) v of halves of the features, or of the heads h and h + H/2 with the values of both."""
    half = (q.shape[-1] if pairs == "features" else q.shape[1]) // 2
    parts = (slice(None, half), slice(half, None))
    heads = q.shape[1]
    maps = []
    for part in parts:
        index = (..., part) if pairs == "features" else (slice(None), part)
        mask = attn_mask
        if pairs == "heads" and mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
            mask = mask[..., part, :, :]
        maps.append(naive_map(naive_logits(q[index], k[index], scale), mask, is_causal))
    if pairs == "heads":
        v = torch.cat([v[:, :half], v[:, half:]], -1)
    return (maps[0] - lam * maps[1]) @ v
