"""The mechanisms as their equations read, with every map in memory: what the real ones are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(tokens: int, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """What each row sees, boolean, ``[..., N, N]``; a bias of -1e4 and less hides, as bfloat16 rounds it."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    if attn_mask is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -9984)
    return seen.tril() if is_causal else seen


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, zeros in rows that see nothing."""
    seen = visibility(k.shape[-2], attn_mask, is_causal)
    logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.masked_fill(~seen, 0.0)
    some = seen.any(-1, keepdim=True)
    weights = logits.masked_fill(~seen & some, float("-inf")).softmax(-1)
    return torch.where(some, weights, torch.zeros_like(weights)) @ v


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
    weight: float | Tensor = 4.0 if threshold == "released" else count.clamp(min=width) ** -0.5
    weight = weight if lam is None else lam
    t = weight * mu if threshold == "released" else weight / mu
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
