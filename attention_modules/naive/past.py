"""Mechanisms whose state is of fixed size, one row after the other, over the tokens that it sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_modules.naive.common import visibility

Weights = Callable[[Tensor, Tensor, int], Tensor]


def _row_by_row(
    weights: Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    starts: Tensor | None,
    eps: float = 0.0,
) -> Tensor:
    """Each row's mean of the values that it sees, by ``weights(query, keys, head)`` ``[n]`` of the keys ``[n, d]``."""
    batch, heads, number, _ = q.shape
    seen = visibility(number, attn_mask, is_causal).expand(batch, heads, number, number)
    samples = []
    for b in range(batch):
        for h in range(heads):
            rows = []
            for i in range(number):
                begun = [j for j in range(i + 1) if starts is not None and starts[b, j]]
                past = [j for j in range(max(begun, default=0), number) if seen[b, h, i, j]]
                found = weights(q[b, h, i], k[b, h, past], h)
                total = found.sum() + eps
                rows.append(found @ v[b, h, past] / torch.where(total > 0, total, torch.ones_like(total)))
            samples.append(torch.stack(rows))
    return torch.stack(samples).unflatten(0, (batch, heads))


def naive_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 512,
    sinks: int = 0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """softmax(z) v over the last keys and the first."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def weights(query: Tensor, keys: Tensor, head: int) -> Tensor:
        number = len(keys)
        seen = [j for j in range(number) if j < sinks or j >= number - window]
        found = torch.zeros(number, dtype=q.dtype)
        return found.index_copy(0, torch.tensor(seen, dtype=torch.long), (keys[seen] @ query * scale).softmax(0))

    return _row_by_row(weights, q, k, v, attn_mask, is_causal, starts)


def naive_hedgehog(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    alpha: Tensor | None = None,
    window: int = 0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """φ(q)·φ(k), and γ exp(z - max z) in the window."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def features(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([(x @ weight).softmax(-1), (-x @ weight).softmax(-1)], -1).clamp(min=1e-12)

    def weights(query: Tensor, keys: Tensor, head: int) -> Tensor:
        far = len(keys) - min(window, len(keys))
        turned = query * scale * q.shape[-1] ** 0.5
        found = features(keys[:far], k_weight[head]) @ features(turned, q_weight[head])
        if far == len(keys):
            return found
        logits = keys[far:] @ query * scale
        factor = torch.ones_like(logits[0]) if alpha is None else alpha[head].sigmoid()
        return torch.cat([found, factor * (logits - logits.amax()).exp()])

    return _row_by_row(weights, q, k, v, attn_mask, is_causal, starts, eps=0.0 if window else 1e-12)


def naive_performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Σ_m (exp(p_m·q̂ - max p·q̂) + 1e-4) exp(p_m·k̂ - |k̂|²/2)."""
    root = q.shape[-1] ** -0.25
    q = q * (root if scale is None else scale / root)

    def weights(query: Tensor, keys: Tensor, head: int) -> Tensor:
        of_query, keys = projection @ query, keys * root
        of_keys = (keys @ projection.mT - keys.square().sum(-1, keepdim=True) / 2).exp()
        return of_keys @ ((of_query - of_query.amax()).exp() + 1e-4)

    return _row_by_row(weights, q, k, v, attn_mask, is_causal, starts)
