"""Sigmoid attention: each weight by itself, without a sum to share (Ramapuram et al., ICLR 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.mechanisms.shared.options import check_number
from attention_modules.mechanisms.shared.rows import mapped
from attention_modules.mechanisms.shared.visible_keys import visible_keys


def sigmoid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: float | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """σ(q kᵀ · scale + bias + mask) v (sigmoid attention, Ramapuram et al., ICLR 2025).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        bias: b; None for -ln n, as the paper recommends, n the number of keys that a row sees (the paper has the
            sequence's length for all rows; ours does not depend on padding).
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import sigmoid_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> sigmoid_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)

    def weights(logits: Tensor, seen: Tensor, first: int) -> Tensor:
        if bias is not None:
            return (logits + bias).sigmoid()
        count = seen.expand(*seen.shape[:-1], logits.shape[-1]).sum(-1, keepdim=True, dtype=logits.dtype)
        return (logits - count.clamp(min=1.0).log()).sigmoid()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by(weights, q, k, v, attn_mask, is_causal, dropout_p, scale)

    def shift() -> Tensor:
        shift = -visible_keys(q, k, attn_mask, is_causal).log()
        return shift if bias is None else torch.full_like(shift, bias)

    return mapped(_Sigmoid(), plain, (q, k, v), attn_mask, is_causal, dropout_p, scale, shift)


class _Sigmoid:
    """σ of each logit, whose slope is w (1 - w)."""

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return logits.sigmoid_(), None

    def again(self, logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = logits.sigmoid_()
        return weights, weights

    def slope(self, above: Tensor, state: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid_backward(above, state)


@register_mechanism("sigmoid")
class SigmoidAttention(TensorMechanism):
    """:func:`sigmoid_attention` as a mechanism, without parameters.

    Args:
        spec: the layer that it serves.
        bias: of the logits; None for -ln of the number of keys that a row sees.

    Raises:
        ValueError: if ``bias`` is no finite number.
    """

    function = staticmethod(sigmoid_attention)
    per_head = ()

    def __init__(self, spec: AttentionSpec, bias: float | None = None) -> None:
        super().__init__(spec)
        self.bias = None if bias is None else check_number("bias", bias)

    def extra_repr(self) -> str:
        return "bias=-ln n" if self.bias is None else f"bias={self.bias}"

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.bias,)
