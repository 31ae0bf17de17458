"""Mechanisms that change the queries."""

from __future__ import annotations

from torch import Tensor

from attention_modules.naive.common import naive_logits, naive_map, visible_count


def naive_ssmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(s ln(n) · z) v."""
    factor = s.view(-1, 1, 1) * visible_count(q, attn_mask, is_causal).log()
    return naive_map(naive_logits(q, k, scale) * factor, attn_mask, is_causal) @ v


def naive_ssa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax((1 + e^(-e^β) ln n) · z) v."""
    factor = 1 + (-beta.view(-1, 1, 1).exp()).exp() * visible_count(q, attn_mask, is_causal).log()
    return naive_map(naive_logits(q, k, scale) * factor, attn_mask, is_causal) @ v


def naive_qk_norm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float = 1e-6,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention between q and k over the root of their mean squares, times their gains."""
    q, k = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * g for x, g in ((q, q_gain), (k, k_gain)))
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v
