"""How many keys each row sees, for temperatures that depend on it."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.masks import visible


def visible_keys(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The number of keys that each row sees, at least 1.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``, not together with ``is_causal``; None = all.
        is_causal: row i sees keys 0 to i only.

    Returns:
        ``[B|1, H|1, N|1, 1]``, at least float32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if is_causal:
        return torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=dtype).view(1, 1, -1, 1)
    if attn_mask is None:
        return torch.full((1, 1, 1, 1), max(k.shape[-2], 1), device=q.device, dtype=dtype)
    seen = visible(attn_mask)
    seen = seen.expand(*seen.shape[:-1], k.shape[-2])
    return seen.sum(-1, keepdim=True, dtype=dtype).clamp(min=1.0)
