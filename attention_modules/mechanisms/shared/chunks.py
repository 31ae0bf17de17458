"""Attention by maps that no fused kernel makes: a few rows at a time, computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import autocast, check_dropout, recomputed, without_autocast
from attention_modules.masks import visible

CHUNK = 128  # rows of a map that are held at once
Weights = Callable[[Tensor, Tensor, int], Tensor]


def attend_by(
    weights: Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """weights(q kᵀ · scale + mask) v, with memory that is linear in the number of tokens.

    Args:
        weights: makes weights of logits ``[B, H, n, M]``, at least float32, of what each row sees, boolean,
            broadcastable to them, and of the place of the first row; what it gives for hidden keys is not read.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: dropout of the weights.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d']``; zeros in rows that see nothing.
    """
    check_dropout(dropout_p)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = autocast(q), autocast(k), autocast(v)
    if k.shape[-2] == 0:  # no row has a largest logit
        return (q @ k.transpose(-2, -1)).to(v.dtype) @ v
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)

    def rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: int) -> Tensor:
        with without_autocast(q.device):
            logits = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
            seen = everything if mask is None else visible(mask)
            if mask is not None and mask.dtype != torch.bool:
                logits = logits + mask.masked_fill(~seen, 0.0)
            if is_causal:
                last = torch.arange(first, first + q.shape[-2], device=q.device)
                seen = torch.arange(k.shape[-2], device=q.device) <= last.unsqueeze(-1)
                seen = seen.view(1, 1, *seen.shape)
            found = torch.where(seen, weights(logits, seen, first), logits.new_zeros(()))
            if dropout_p > 0.0:
                found = F.dropout(found, dropout_p)
            return found.to(v.dtype) @ v

    if q.shape[-2] <= CHUNK:
        return rows(q, k, v, attn_mask, 0)
    out = []
    for first in range(0, q.shape[-2], CHUNK):
        part, mask = q[..., first : first + CHUNK, :], attn_mask
        last = first + part.shape[-2] if is_causal else k.shape[-2]
        keys, values = k[..., :last, :], v[..., :last, :]
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., first : first + CHUNK, :]
        out.append(recomputed(rows, part, keys, values, mask, first, random=dropout_p > 0.0))
    return torch.cat(out, -2)
