"""Mechanisms that read the values of other layers."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.naive.common import naive_logits, naive_map, visibility


def naive_neutreno(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor,
    alpha: float = 0.6,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A v + α (v⁰ - v)."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v + alpha * (first_value - v)


def naive_value_residual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor,
    weight: float = 0.5,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """A ((1 - w) v + w v⁰)."""
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return a @ ((1 - weight) * v + weight * first_value)


def naive_elliptical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous_value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax((q ∘ w) kᵀ) v, w = m / max m, m the mean of |v - v of the layer before| over the keys that a row sees."""
    seen = visibility(k.shape[-2], attn_mask, is_causal).expand(*q.shape[:2], -1, -1).to(q.dtype)
    mean = seen @ (v - previous_value).detach().abs() / seen.sum(-1, keepdim=True).clamp(min=1)
    w = torch.where(mean.amax(-1, keepdim=True) > 0, mean / mean.amax(-1, keepdim=True), torch.ones_like(mean))
    return naive_map(naive_logits(q * w, k, scale), attn_mask, is_causal) @ v
