"""Attention with a learned bias of each pair of positions (the random factor of Synthesizer, Tay et al., ICML 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import TensorMechanism
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import first_square
from attention_modules.mechanisms.shared.options import check_length, check_table, spec_of_length
from attention_modules.mechanisms.shared.rows import softmax_with
from attention_modules.mechanisms.symmetric import check_self_attention


def position_bias_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + B + mask) v, where B does not depend on the input (Synthesizer, Tay et al., ICML 2021).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        position_bias: B of each head and pair of positions, ``[H, N, N]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or there is not one query for each key.

    Example:
        >>> import torch
        >>> from attnswap.functional import position_bias_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> position_bias_attention(q, k, v, torch.zeros(3, 5, 5)).shape
        torch.Size([1, 3, 5, 8])
    """
    check_self_attention("position_bias", q, k)
    heads, tokens = k.shape[-3:-1]
    if position_bias.shape != (heads, tokens, tokens):
        raise ValueError(
            f"position_bias must be [H, N, N] = {(heads, tokens, tokens)}, got {tuple(position_bias.shape)}"
        )
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    return softmax_with(_Bias(), position_bias, q, k, v, attn_mask, is_causal, dropout_p, scale)


class _Bias:
    """B of each pair of positions."""

    def values(self, learned: Tensor, rows: slice, columns: int) -> Tensor:
        return learned[:, rows, :columns]

    def collect(self, slope: Tensor, gradient: Tensor, rows: slice) -> None:
        gradient[:, rows, : slope.shape[-1]] += slope.sum(0)


@register_mechanism("position_bias")
class PositionBiasAttention(TensorMechanism):
    """:func:`position_bias_attention` with a bias that is learned; at its start, B = 0, it is plain attention.

    Args:
        spec: the layer that it serves.
        num_tokens: the longest sequence, that of ``spec`` where None. Shorter ones use the first rows and columns.

    Raises:
        ValueError: if nothing says how many tokens there are at most, or there would be more than 2³² biases.
    """

    function = staticmethod(position_bias_attention)
    one_query_per_key = True
    counts_columns = True
    per_head = ("position_bias",)
    own_logits: ClassVar = "it adds a learned bias"
    neutral: ClassVar = {}

    def __init__(self, spec: AttentionSpec, num_tokens: int | None = None) -> None:
        spec, longest = spec_of_length(spec, num_tokens, "position_bias learns a bias for each pair of positions")
        sizes = check_table((spec.num_heads, longest, longest), longest)
        super().__init__(spec)
        self.position_bias = nn.Parameter(torch.zeros(sizes))

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        check_length("position_bias", k.shape[-2], self.position_bias.shape[-1])
        return (first_square(self.position_bias, k.shape[-2]),)
