"""Gated attention: a gate on each head's output, made of the layer's input (Qiu et al., NeurIPS 2025)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.normal_linear import NormalLinear
from attention_modules.mechanisms.shared.options import check_choice, check_number
from attention_modules.mechanisms.shared.probe import kernel_maps

Gate = Literal["head", "element"]


def gated_attention(
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
    """softmax(q kᵀ · scale + mask) v ⊙ σ(gate) (gated attention, Qiu et al., NeurIPS 2025).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        gate: logits of the gate, ``[B, H, N, 1]`` for one per head and token, ``[B, H, N, d]`` for one per element.
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
        >>> from attnswap.functional import gated_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> gated_attention(q, k, v, torch.zeros(1, 3, 5, 1)).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    out = attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)
    if gate.shape[:-1] != out.shape[:-1] or gate.shape[-1] not in (1, out.shape[-1]):
        raise ValueError(
            f"gate must be [B, H, N, 1] or [B, H, N, d] for outputs {tuple(out.shape)}, got {tuple(gate.shape)}"
        )
    return out * gate.sigmoid().to(out.dtype)


@register_mechanism("gated")
class GatedAttention(TensorMechanism):
    """:func:`gated_attention` as a mechanism, with a linear map of the layer's input as the gate's logits.

    Args:
        spec: the layer that it serves.
        gate: ``"head"``, one gate per head and token, which adds ``dim * num_heads`` weights; ``"element"``, one per
            element of the head's output, which adds ``dim * num_heads * value_dim``.
        bias: start of the gate's bias. The published form starts at 0, where gates are about a half; with 10 the start
            is plain attention up to 5e-5.
        std: standard deviation of the gate's weights at the start, 0 for gates that depend on the bias alone.

    Raises:
        ValueError: if ``gate`` is unknown, or a number out of its limits.
    """

    function = staticmethod(gated_attention)
    needs = ("x",)
    softmax_like = True
    per_head = ("gate.weight", "gate.bias")
    neutral: ClassVar = {"bias": 30.0, "std": 0.0}

    def __init__(self, spec: AttentionSpec, gate: Gate = "head", bias: float = 0.0, std: float = 0.02) -> None:
        super().__init__(spec)
        self.kind = check_choice("gate", gate, get_args(Gate))
        width = 1 if gate == "head" else spec.value_dim or spec.head_dim
        std, bias = check_number("std", std, at_least=0.0), check_number("bias", bias)
        self.gate = NormalLinear(spec.dim, spec.num_heads * width, std, bias)

    def extra_repr(self) -> str:
        return f"gate={self.kind!r}"

    def tensors(self, k: Tensor, x: Tensor | None = None) -> tuple[Any, ...]:
        gate = self.gate(self.needed("x", x))
        return (gate.unflatten(-1, (k.shape[1], -1)).transpose(1, 2),)

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """With a gate per element that of softmax, whose output the gate multiplies; else rows sum to the gate."""
        return kernel_maps(self, q, k, v, **given)[-1] if self.kind == "element" else None
