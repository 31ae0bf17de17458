"""A third party's mechanism: softmax attention within a window, known to attnswap by its entry point alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_modules import AttentionMechanism, AttentionSpec


class WindowAttention(AttentionMechanism):
    """Softmax attention among tokens that are at most ``window`` apart."""

    def __init__(self, spec: AttentionSpec, window: int = 4) -> None:
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be an integer of at least 1, got {window!r}")
        super().__init__(spec)
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        rows = torch.arange(q.shape[-2], device=q.device)[:, None]
        columns = torch.arange(k.shape[-2], device=q.device)
        near = (rows - columns).abs() <= self.window
        if is_causal:
            near = near & (columns <= rows)
        if attn_mask is None:
            attn_mask = near
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & near
        else:
            attn_mask = attn_mask.masked_fill(~near, float("-inf"))
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
