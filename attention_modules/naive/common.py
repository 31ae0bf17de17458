"""What the references share: what each row sees, logits, and a map of them."""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(tokens: int, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """What each row sees, boolean, ``[..., N, N]``; a bias of -1e4 and less hides, as bfloat16 rounds it."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    if attn_mask is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -9984)
    return seen.tril() if is_causal else seen


def naive_logits(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q kᵀ · scale."""
    return q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)


def naive_map(
    logits: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, sink: Tensor | None = None
) -> Tensor:
    """exp(z) / (exp(s) + Σ exp(z)) of the logits z and their mask, zeros where hidden; without a sink, softmax."""
    logits, seen = _hidden(logits, attn_mask, is_causal)
    top = logits.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True).clamp(min=-1e30)
    top = top if sink is None else top.maximum(sink.view(-1, 1, 1))
    weights = torch.where(seen, logits - top, float("-inf")).exp()
    rest = torch.zeros_like(top) if sink is None else (sink.view(-1, 1, 1) - top).exp()
    total = weights.sum(-1, keepdim=True) + rest
    return weights / total.where(total > 0, torch.ones_like(total))


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v, zeros in rows that see nothing."""
    return naive_map(naive_logits(q, k, scale), attn_mask, is_causal) @ v


def visible_count(q: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """How many keys each row sees, at least 1, ``[..., N, 1]``."""
    return visibility(q.shape[-2], attn_mask, is_causal).sum(-1, keepdim=True).clamp(min=1).to(q.dtype)


def _hidden(logits: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Logits with the finite part of their mask, and what each row sees."""
    seen = visibility(logits.shape[-1], attn_mask, is_causal).expand(logits.shape)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.masked_fill(attn_mask <= -9984, 0.0)
    return logits, seen
