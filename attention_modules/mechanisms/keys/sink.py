"""Attention sinks: a learned share of attention that goes to nothing; softmax-plus-one where it is not learned."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import TensorMechanism
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.columns import attend_with_sink
from attention_modules.mechanisms.shared.options import check_flag, check_number


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention whose weights are exp(z) / (exp(s) + Σ exp(z)), z the row's logits and s that of the head's sink.

    With s = 0 it is softmax-plus-one (E. Miller, "Attention is off by one", 2023), with s = ln n "softmax-n", with s
    toward -∞ softmax. gpt-oss (OpenAI, 2025) learns one s per head. Equal to softmax attention times σ(lse z - s).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        sink: s, ``[H]``.
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
        >>> from attnswap.functional import sink_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> sink_attention(q, k, v, torch.zeros(3)).shape
        torch.Size([1, 3, 5, 8])
    """
    if sink.shape != q.shape[1:2]:
        raise ValueError(f"sink must be one number per head, ({q.shape[1]},), got {tuple(sink.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    return attend_with_sink(q, k, v, sink, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("sink")
class SinkAttention(TensorMechanism):
    """:func:`sink_attention` as a mechanism, with one s per head.

    Args:
        spec: the layer that it serves.
        start: value of s at the start. 0 is softmax-plus-one; -30 is softmax attention up to rounding, which keeps a
            pretrained layer as it is.
        std: standard deviation of s at the start, around ``start`` (gpt-oss draws from N(0, 0.02)).
        learned: whether s is trained.

    Raises:
        ValueError: if a number is out of its limits, or ``learned`` is neither True nor False.
    """

    function = staticmethod(sink_attention)
    neutral: ClassVar = {"start": -30.0, "std": 0.0}
    softmax_like = True
    per_head = ("sink",)

    def __init__(self, spec: AttentionSpec, start: float = 0.0, std: float = 0.0, learned: bool = True) -> None:
        super().__init__(spec)
        s = check_number("start", start) + check_number("std", std, at_least=0.0) * torch.randn(spec.num_heads)
        self.sink = nn.Parameter(s, requires_grad=check_flag("learned", learned))

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.sink,)
