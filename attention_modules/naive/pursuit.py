"""Principal Attention Pursuit and Scaled Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.naive.common import naive_attention, visibility


def soft(x: Tensor, t: Tensor) -> Tensor:
    return x - torch.minimum(torch.maximum(x, -t), t)


def naive_rpc(
    k: Tensor,
    v: Tensor,
    iterations: int = 4,
    lam: float | None = None,
    threshold: str = "released",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Principal Attention Pursuit with its dual variable Y and its mu, a row."""
    heads, tokens, width = k.shape[-3:]
    if attn_mask is None and not is_causal:
        count, norm = torch.tensor(float(tokens), dtype=k.dtype), k.abs().sum((-2, -1), keepdim=True)
    else:
        seen = visibility(tokens, attn_mask, is_causal).expand(*k.shape[:-1], tokens)
        count = seen.sum(-1, keepdim=True).to(k.dtype)
        norm = torch.where(seen, k.abs().sum(-1).unsqueeze(-2), 0.0).sum(-1, keepdim=True)
    mu = count * width * (heads if threshold == "released" else 1) / (4 * norm)
    weight: float | Tensor = count.clamp(min=width) ** -0.5 if threshold == "ratio" else 4.0
    weight = weight if lam is None else lam
    t = weight / mu if threshold == "ratio" else weight * mu
    low_rank = dual = torch.zeros_like(k)
    for _ in range(iterations):
        sparse = soft(k - low_rank + dual / mu, t)
        keys = k - sparse - dual / mu
        low_rank = naive_attention(keys, keys, v, attn_mask, is_causal, scale)
        dual = dual + mu * (k - low_rank - sparse)
    return low_rank


def naive_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) (I - S) v, S a matrix per head or a number times softmax(k kᵀ · scale)."""
    if s.dim() == 3:
        seen = visibility(k.shape[-2], attn_mask, is_causal)
        corrected = v - torch.where(seen, s, torch.zeros_like(s)) @ v
    else:
        corrected = v - s * naive_attention(k, k, v, attn_mask, is_causal, scale)
    return naive_attention(q, k, corrected, attn_mask, is_causal, scale)
