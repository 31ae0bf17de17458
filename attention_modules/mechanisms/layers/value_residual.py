"""Value residual learning: each layer mixes the values of the first layer with its own (Zhou et al., ACL 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.options import check_number
from attention_modules.mechanisms.shared.probe import kernel_maps


def value_residual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor | None,
    weight: float = 0.5,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) ((1 - w) v + w v⁰) (value residual learning, Zhou et al., ACL 2025).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        first_value: values v⁰ of the first layer, ``[B, H, M, d]``; None in that layer, which is plain attention.
        weight: w, the share of the first layer's values.
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
        >>> from attnswap.functional import value_residual_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> value_residual_attention(q, k, v, first_value=v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    value = v if first_value is None else v.lerp(first_value, weight)
    return attend(q, k, value, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("value_residual")
class ValueResidualAttention(TensorMechanism):
    """:func:`value_residual_attention` as a mechanism, for all layers of a stack; the first is plain attention.

    Args:
        spec: the layer that it serves.
        weight: share of the first layer's values, from 0 (plain attention) to 1.

    Raises:
        ValueError: if ``weight`` is out of its limits.
    """

    function = staticmethod(value_residual_attention)
    needs = ("first_value",)
    per_head = ()
    neutral: ClassVar = {"weight": 0.0}

    def __init__(self, spec: AttentionSpec, weight: float = 0.5) -> None:
        super().__init__(spec)
        self.weight = check_number("weight", weight, at_least=0.0, at_most=1.0)

    def extra_repr(self) -> str:
        return f"weight={self.weight}"

    def tensors(self, k: Tensor, first_value: Tensor | None = None) -> tuple[Any, ...]:
        return first_value, self.weight

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """softmax(q kᵀ · scale + mask), which mixes the values and those of the first layer alike."""
        return kernel_maps(self, q, k, v, **given)[-1]
