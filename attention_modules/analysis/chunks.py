"""Logits of attention, some rows at a time: never the N x M map of all heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_modules.masks import visible

# Logits held at once in a chunk: 4 MiB of float32.
CHUNK_ELEMENTS = 2**20


@dataclass(frozen=True)
class ChunkedLogits:
    """The logits of an attention map as their factors: queries and keys in fp32, mask, causality, scale."""

    q: Tensor  # [B, H, N, d]
    k: Tensor  # [B, H, M, d]
    visible: Tensor | None  # boolean, broadcastable to [B, H, N, M]
    bias: Tensor | None  # additive, broadcastable to [B, H, N, M]
    is_causal: bool
    scale: float

    def chunks(self) -> Iterator[Tensor]:
        """Masked logits of some rows at a time, ``[B, H, rows, M]``."""
        batch, heads, rows, _ = self.q.shape
        columns = self.k.shape[2]
        step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            logits = (self.q[:, :, start:stop] * self.scale) @ self.k.mT
            if self.bias is not None:
                logits = logits + _rows(self.bias, start, stop)
            if self.visible is not None:
                logits = logits.masked_fill(~_rows(self.visible, start, stop), float("-inf"))
            if self.is_causal:
                row = torch.arange(start, stop, device=logits.device).unsqueeze(-1)
                column = torch.arange(columns, device=logits.device)
                logits = logits.masked_fill(column > row, float("-inf"))
            yield logits

    def visible_counts(self) -> Tensor:
        """``|V_i|``, the number of keys that each row sees, broadcastable to ``[B, H, N]``."""
        rows, columns = self.q.shape[2], self.k.shape[2]
        if self.visible is None:
            if not self.is_causal:
                return torch.full((1, 1, rows), columns, device=self.q.device)
            return torch.arange(1, rows + 1, device=self.q.device).clamp(max=columns).view(1, 1, rows)
        visible = self.visible.expand(*self.visible.shape[:-1], columns)
        if not self.is_causal:
            return visible.sum(-1)
        if visible.shape[-2] == 1:  # every row has the same keys, of which row i sees the first i + 1
            last = torch.arange(rows, device=self.q.device).clamp(max=columns - 1)
            return visible.cumsum(-1)[..., 0, :][..., last]
        return visible.tril().sum(-1)


def _rows(mask: Tensor, start: int, stop: int) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., start:stop, :]


def split_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(visible, bias) of a mask, ``[B|1, H|1, N|1, M]``; the bias of a boolean one is None."""
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask, None
    seen = visible(attn_mask)
    return seen, attn_mask.float().masked_fill(~seen, 0.0)


def check_shapes(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> None:
    """Check that queries, keys and mask fit each other.

    Raises:
        ValueError: if they do not, or heads, rows, keys or width are 0.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be [B, H, N, d] and k [B, H, M, d], got {tuple(q.shape)} and {tuple(k.shape)}")
    if not all((*q.shape[1:], k.shape[2])):  # kernels divide by these, and end the process
        raise ValueError(f"H, N, M and d must be at least 1, got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if attn_mask is None:
        return
    target = (*q.shape[:3], k.shape[2])
    try:
        fits = torch.broadcast_shapes(attn_mask.shape, target) == torch.Size(target)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"attn_mask must broadcast to [B, H, N, M] = {target}, got {tuple(attn_mask.shape)}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean or floating point, got {attn_mask.dtype}")
