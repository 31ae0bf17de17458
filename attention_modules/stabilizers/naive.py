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
