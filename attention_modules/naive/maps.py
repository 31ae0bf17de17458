"""Mechanisms whose weights are no softmax of one head."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.naive.common import _hidden, naive_logits, naive_map


def naive_sigmoid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """σ(z + b) v, b = -ln of the number of visible keys where it is None."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    b = -seen.sum(-1, keepdim=True).clamp(min=1).to(q.dtype).log() if bias is None else bias
    return (seen / (1 + (-logits - b).exp())) @ v


def naive_entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float = 1.5,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """[(α - 1) z - τ]₊^{1/(α - 1)} v, τ by bisection, and its gradient by one step of Newton's method."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    z = (alpha - 1) * logits
    power = 1 / (alpha - 1)

    def weights(tau: Tensor) -> Tensor:
        return torch.where(seen, (z - tau).clamp(min=0), 0.0) ** power

    with torch.no_grad():
        high = z.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e3)
        low = high - 1
        for _ in range(80):
            middle = (low + high) / 2
            enough = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        slope = -power * (torch.where(seen & (z > low), z - low, 0.0) ** (power - 1) * (seen & (z > low))).sum(
            -1, keepdim=True
        )
        slope = slope.where(slope < 0, -torch.ones_like(slope))
    tau = low - (weights(low).sum(-1, keepdim=True) - 1) / slope
    return torch.where(seen.any(-1, keepdim=True), weights(tau), 0.0) @ v


def naive_hard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(one_hot(z) + A - stop_gradient(A)) v."""
    logits, seen = _hidden(naive_logits(q, k, scale), attn_mask, is_causal)
    largest = logits.masked_fill(~seen, float("-inf")).argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(logits).scatter(-1, largest, 1.0) * seen
    a = naive_map(naive_logits(q, k, scale), attn_mask, is_causal)
    return (one_hot + a - a.detach()) @ v


def naive_talking_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix_logits: Tensor,
    mix_weights: Tensor,
    bias_logits: Tensor | None = None,
    bias_weights: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(W softmax(L z + l) + w) v, L and W mixing heads; w for the keys that are seen."""
    logits = torch.einsum("hf,bfnm->bhnm", mix_logits, naive_logits(q, k, scale))
    if bias_logits is not None:
        logits = logits + bias_logits.view(-1, 1, 1)
    a = torch.einsum("gh,bhnm->bgnm", mix_weights, naive_map(logits, attn_mask, is_causal))
    if bias_weights is not None:
        a = a + bias_weights.view(-1, 1, 1) * _hidden(logits, attn_mask, is_causal)[1]
    return a @ v


def naive_dam(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(z - 10⁴ (1 - m)) v, m a gate for each distance."""
    places = torch.arange(k.shape[-2])
    gate = gates[:, (places.unsqueeze(-1) - places).abs()]
    return naive_map(naive_logits(q, k, scale) - 1e4 * (1 - gate), attn_mask, is_causal) @ v


def naive_position_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(z + B) v, B learned and free of the input."""
    return naive_map(naive_logits(q, k, scale) + position_bias, attn_mask, is_causal) @ v
