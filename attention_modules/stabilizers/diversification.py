"""The attention diversification loss: rows of the mean map over heads should attend to different tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import recomputed, without_autocast
from attention_modules.masks import combine_masks, visible
from attention_modules.mechanisms.shared.chunks import CHUNK


def diversification_loss(
    q: Tensor,
    k: Tensor,
    *,
    threshold: float = 2.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    counting: Tensor | None = None,
) -> Tensor:
    """The mean cosine between each row of the mean map over heads and the mean row (Guo et al., ICCV 2023).

    As released: of the map ``[B, N, M]``, averaged over heads, and of its mean row, what is at most threshold / M
    counts as 0. Where rows see different keys (our reading), a row's limit is threshold / n_i of the n_i keys that it
    sees, the mean row's that of the row that sees most, and rows that see nothing count in no mean. It holds that one
    map, of all heads together, and the maps of single heads for some rows at a time.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        threshold: in units of uniform attention, at least 0.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.
        counting: which rows count, boolean ``[B, N]``; all where None.

    Returns:
        A scalar of at least float32, from 0 to 1: 1 where all rows attend alike. 0 where no row sees a key.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.diversification import diversification_loss
        >>> q = 50 * torch.eye(4).view(1, 1, 4, 4)  # each token attends to itself alone
        >>> diversification_loss(q, q, threshold=0.5)  # the mean row is uniform
        tensor(0.5000)
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        q, k = q.to(dtype) * scale, k.to(dtype)
        if q.shape[-2] == 0 or k.shape[-2] == 0:
            return (q @ k.mT).sum()
        parts, counts = [], []
        for first in range(0, q.shape[-2], CHUNK):
            rows = q[..., first : first + CHUNK, :]
            mask, seen = _masks(attn_mask, is_causal, first, rows, k)
            if counting is not None:
                seen = seen & counting[:, None, first : first + CHUNK, None]
            counts.append(seen.any(1).sum(-1).expand(len(q), rows.shape[-2]))
            parts.append(recomputed(_mean_over_heads, rows, k, mask, seen))
        return _mean_cosine(torch.cat(parts, 1), torch.cat(counts, 1), threshold)


def _masks(
    attn_mask: Tensor | None, is_causal: bool, first: int, rows: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor]:
    """What is added to the logits of some rows, if anything, and what they see, ``[B|1, H|1, n|1, M]``."""
    columns = torch.arange(k.shape[-2], device=k.device)
    if attn_mask is None:
        last = torch.arange(first, first + rows.shape[-2], device=k.device).unsqueeze(-1)
        return None, ((columns <= last) if is_causal else (columns >= 0)).view(1, 1, -1, len(columns))
    part = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., first : first + CHUNK, :]
    part = part.expand(*part.shape[:-1], len(columns))
    return (None if part.dtype == torch.bool else part), visible(part)


def _mean_over_heads(rows: Tensor, k: Tensor, mask: Tensor | None, seen: Tensor) -> Tensor:
    logits = rows @ k.mT
    if mask is not None:
        logits = logits + mask.to(logits.dtype).masked_fill(~seen, 0.0)
    some = seen.any(-1, keepdim=True)
    weights = logits.masked_fill(~seen & some, float("-inf")).softmax(-1)
    return torch.where(some, weights, 0.0).mean(1)  # [B, n, M]


def _mean_cosine(mean_map: Tensor, counts: Tensor, threshold: float) -> Tensor:
    """Of a map ``[B, N, M]`` whose rows see ``counts`` keys, ``[B, N]``."""
    some = counts > 0
    rows = some.sum(1).clamp(min=1)
    mean_row = mean_map.sum(1) / rows.unsqueeze(-1)  # [B, M]; rows that see nothing hold zeros
    limits = threshold / counts.clamp(min=1).to(mean_map.dtype)
    limit = threshold / counts.amax(1).clamp(min=1).to(mean_map.dtype)
    mean_row = torch.where(mean_row <= limit.unsqueeze(-1), 0.0, mean_row).unsqueeze(1)  # NaN is kept
    kept = torch.where(mean_map <= limits.unsqueeze(-1), 0.0, mean_map)
    cosine = F.cosine_similarity(mean_row, kept, dim=-1)  # [B, N]
    return (torch.where(some, cosine, 0.0).sum(1) / rows).mean()
