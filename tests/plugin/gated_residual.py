"""A third party's mechanism that reads the layer's input and the values of the first layer of its stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attention_modules import AttentionMechanism, AttentionSpec


class GatedResidualAttention(AttentionMechanism):
    """Softmax attention plus the first layer's values, through a gate per head that the layer's input opens."""

    needs = ("x", "first_value")
    one_query_per_key = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.gate = nn.Linear(spec.dim, spec.num_heads)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        *,
        x: Tensor | None = None,
        first_value: Tensor | None = None,
    ) -> Tensor:
        if is_causal and attn_mask is not None:
            past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            attn_mask, is_causal = (
                attn_mask & past if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~past, float("-inf")),
                False,
            )
        out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        gate = self.gate(self.needed("x", x)).sigmoid().transpose(1, 2).unsqueeze(-1).to(out.dtype)
        return out if first_value is None else out + gate * first_value
