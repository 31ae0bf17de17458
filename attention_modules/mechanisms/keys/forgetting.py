"""Forgetting attention: a gate at each token lets what lies before it fade (Lin et al., ICLR 2025)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import without_autocast
from attention_modules.masks import check_mask, combine_masks, hide, visible
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.mechanisms.shared.columns import attend_with_key_bias
from attention_modules.mechanisms.shared.normal_linear import NormalLinear
from attention_modules.mechanisms.shared.options import check_number
from attention_modules.mechanisms.symmetric import check_self_attention


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q_i·k_j · scale + D_ij + mask) v, D_ij = Σ_{j < l <= i} ln σ(gate_l) (Lin et al., ICLR 2025).

    The sum is over the keys l that row i sees (our reading; the paper has no masks). Without a mask that tells rows
    apart, D_ij = c_i - c_j with one running sum c: attention with the bias -c_j per key. With one, each row has its own
    sums: the map is made some rows at a time, in at least float32, and again in the backward pass. Meant for causal
    layers: later keys that are not hidden would weigh more the more is forgotten between.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``; with a key-value cache M > N.
        v: values ``[B, H, M, d]``.
        gate: logits of the forget gates of all tokens that have a key, ``[B, H, M]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on q kᵀ, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import forgetting_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> forgetting_attention(q, k, v, torch.zeros(1, 3, 5), is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    if gate.shape != k.shape[:-1]:
        raise ValueError(f"gate must be [B, H, M] = {tuple(k.shape[:-1])}, got {tuple(gate.shape)}")
    check_mask(attn_mask, q, k)
    of_tokens = attn_mask  # which hides the same tokens from all rows
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    with without_autocast(k.device):
        log_gates = F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        if of_tokens is not None:
            of_tokens = of_tokens.view((1,) * (4 - of_tokens.dim()) + tuple(of_tokens.shape))
            if of_tokens.shape[-2] > 1:
                return _of_each_row(q, k, v, log_gates, attn_mask, dropout_p, scale)
            log_gates = torch.where(visible(of_tokens).squeeze(-2), log_gates, 0.0)
        faded = log_gates.cumsum(-1)
    return attend_with_key_bias(q, k, v, -faded, hide(attn_mask), is_causal, dropout_p, scale)


def _of_each_row(
    q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """Of rows that see different keys, each with the running sum over its own."""

    def weights(logits: Tensor, seen: Tensor, first: int) -> Tensor:
        faded = torch.where(seen, log_gates.unsqueeze(-2), 0.0).cumsum(-1)
        lowest = torch.finfo(logits.dtype).min / 2  # -inf would be NaN in rows that see nothing
        return torch.where(seen, logits - faded, lowest).softmax(-1)

    return attend_by(weights, q, k, v, attn_mask, False, dropout_p, scale)


@register_mechanism("forgetting")
class ForgettingAttention(AttentionMechanism):
    """:func:`forgetting_attention` as a mechanism, with a linear map of the layer's input as the gates' logits.

    Args:
        spec: the layer that it serves.
        bias: start of the gates' bias; 30 is plain attention up to rounding.
        std: standard deviation of the gates' weights at the start.

    Raises:
        ValueError: if a number is out of its limits.
    """

    needs = ("x",)
    one_query_per_key = True
    cache = "keys and values"
    remembers = True
    per_head = ("gate.weight", "gate.bias")
    neutral: ClassVar = {"bias": 30.0, "std": 0.0}

    def __init__(self, spec: AttentionSpec, bias: float = 0.0, std: float = 0.02) -> None:
        super().__init__(spec)
        std, bias = check_number("std", std, at_least=0.0), check_number("bias", bias)
        self.gate = NormalLinear(spec.dim, spec.num_heads, std, bias)

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
        kept: Tensor | None = None,
    ) -> Tensor:
        """Mix the values, the far ones faded.

        Args:
            x: the layer's input ``[B, N, C]``.
            kept: what :meth:`remember` gave of all tokens that have a key, ``[B, H, M]``, where a cache holds some.

        Raises:
            ValueError: if there is no ``x``, or the numbers of queries and keys differ without ``kept``.
        """
        if kept is None:
            check_self_attention("forgetting", q, k)
            kept = self.remember(self.needed("x", x))
        return forgetting_attention(
            q, k, v, kept, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale
        )

    def remember(self, x: Tensor) -> Tensor:
        """The logits of the gates, ``[B, H, N]``, of the layer's input ``[B, N, C]``."""
        return self.gate(x).transpose(1, 2)
