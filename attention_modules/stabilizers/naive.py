"""The penalties as their equations read, with every map in memory: what the real ones are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_logits(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """q kᵀ · scale plus what the mask adds, -inf where it hides."""
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    seen = (seen.tril() if is_causal else seen).expand_as(logits)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask > -9984)
        logits = logits + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    return logits.masked_fill(~seen, float("-inf"))


def naive_row_entropy(
    q: Tensor, k: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """-Σ A ln A of each row, 0 in rows that see nothing, ``[B, H, N]``."""
    logits = naive_logits(q, k, attn_mask, is_causal, scale)
    some = (logits > float("-inf")).any(-1, keepdim=True)
    log_a = torch.where(some, logits, 0.0).log_softmax(-1)
    finite = log_a.masked_fill(log_a == float("-inf"), 0.0)  # 0 ln 0 is 0
    return torch.where(some.squeeze(-1), -(log_a.exp() * finite).sum(-1), 0.0)


def naive_diversification(
    q: Tensor,
    k: Tensor,
    threshold: float = 2.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The mean cosine between thresholded rows and the thresholded mean row, one sample at a time."""
    logits = naive_logits(q, k, attn_mask, is_causal, scale)
    seen = logits > float("-inf")
    some = seen.any(-1, keepdim=True)
    maps = torch.where(some, torch.where(some, logits, 0.0).softmax(-1), 0.0).mean(1)
    cosines = []
    for a, of_heads in zip(maps, seen, strict=True):
        counts = of_heads.any(0).sum(-1, keepdim=True)
        a, counts = a[counts[:, 0] > 0], counts[counts[:, 0] > 0]
        if not len(a):
            cosines.append(a.sum())
            continue
        mean_row = a.mean(0)
        mean_row = mean_row * (mean_row > threshold / counts.max())
        cosines.append(torch.cosine_similarity(mean_row, a * (a > threshold / counts), dim=-1).mean())
    return torch.stack(cosines).mean()
