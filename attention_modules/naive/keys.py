"""Mechanisms that change the keys or their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.naive.common import _hidden, naive_logits, naive_map, visibility


def naive_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """exp(z) / (exp(s) + Σ exp(z)) v."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal, sink) @ v


def naive_l2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k‖² · scale) v."""
    distances = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    return naive_map(-distances * (q.shape[-1] ** -0.5 if scale is None else scale), attn_mask, is_causal) @ v


def naive_kde(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k̂‖² · scale) v, k̂ the keys of norm 1."""
    return naive_l2(q, k / k.norm(dim=-1, keepdim=True), v, attn_mask, is_causal, scale)


def naive_rkde(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loss: str = "huber",
    a: float = 0.2,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Kernels with the weights of one robust step, of the keys below and of the pairs of key and value above."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k / k.norm(dim=-1, keepdim=True)
    seen = visibility(k.shape[-2], attn_mask).to(k.dtype).expand(*k.shape[:-1], k.shape[-2])  # all rows alike
    count = seen[..., :1, :].sum(-1).clamp(min=1)

    def weights(x: Tensor) -> Tensor:
        kernel = (-scale * (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)).exp()
        near = (kernel * seen).sum(-1) / count
        h = (1 + near + (near * seen[..., 0, :]).sum(-1, keepdim=True) / count).sqrt()
        w = torch.where(h <= a, 1.0, a / h)
        if loss == "hampel":
            w = torch.where(h < 2 * a, w, torch.where(h < 3 * a, (3 * a - h) / h, 0.01))
        return w / (w * seen[..., 0, :]).sum(-1, keepdim=True).clamp(min=1e-30)

    z = -scale * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    p = naive_map(z, attn_mask)  # the sum of the kernels cancels
    above = (p * weights(torch.cat([k, v], -1)).unsqueeze(-2)) @ v
    below = (p * weights(k).unsqueeze(-2)).sum(-1, keepdim=True)
    return above / torch.where(below > 0, below, 1.0)


def naive_mom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draws: Tensor,
    outliers: float = 0.05,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Kernels over the subset of keys whose sum of logits over heads, queries and keys is the median."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k / k.norm(dim=-1, keepdim=True)
    z = -scale * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    seen = visibility(k.shape[-2], attn_mask).expand(len(q), 1, *z.shape[-2:])[:, 0, 0]
    kept = torch.zeros(len(q), 1, 1, k.shape[-2], dtype=torch.bool)
    for sample, shown in enumerate(seen):
        places = shown.nonzero().flatten().tolist()
        orders = [[places[j] for j in draw[: len(places)].argsort().tolist()] for draw in draws]
        subsets = [order[: max(int(len(order) * (1 - outliers)), 1)] for order in orders]
        sums = [z[sample][:, shown][:, :, subset].sum().item() for subset in subsets]
        kept[sample, 0, 0, subsets[sorted(range(len(sums)), key=sums.__getitem__)[len(sums) // 2]]] = True
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        z = z + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    return naive_map(z, kept) @ v


def naive_sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iterations: int = 3,
    detach: bool = True,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Rows and columns of exp(q kᵀ) normalized in turn, hidden tokens left out of both.

    Where ``detach``, the columns' factors have no gradient.
    """
    none = -1e30  # the logarithm of a weight of zero
    log, seen = _hidden(naive_logits(q, k, scale), attn_mask, False)
    asks = seen[..., -1:, :].transpose(-2, -1)  # a token that is hidden as a key is none as a query

    def rows(log: Tensor) -> Tensor:
        return log.masked_fill(~seen, none).log_softmax(-1)

    log = rows(log)
    for _ in range((iterations - 1) // 2):
        # Only the factors of the columns are without a gradient: those of the rows cancel in the last step.
        columns = (log.detach() if detach else log).masked_fill(~asks, none).logsumexp(-2, keepdim=True)
        log = rows(log - columns)
    return torch.where(seen, log.exp(), 0.0) @ v


def naive_forgetting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(z_ij + D_ij) v, D_ij = Σ ln σ(gate_l) over the keys j < l <= i that row i sees; minus that sum over
    i < l <= j for later keys."""
    seen = visibility(k.shape[-2], attn_mask, is_causal)
    sums = torch.where(seen, gate.sigmoid().log().unsqueeze(-2), 0.0).cumsum(-1)  # [B, H, N, N], of each row
    own = sums.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return naive_map(naive_logits(q, k, scale) + own - sums, attn_mask, is_causal) @ v
