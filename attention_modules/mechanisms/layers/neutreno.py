"""NeuTRENO: a pull of each layer's output toward the values of the first layer (Nguyen et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.options import check_number
from attention_modules.mechanisms.shared.probe import kernel_maps
from attention_modules.mechanisms.symmetric import check_self_attention


def neutreno_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_value: Tensor | None,
    alpha: float = 0.6,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v + α (v⁰ - v) (NeuTRENO, Nguyen et al., NeurIPS 2023, and their released code).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        first_value: values v⁰ of the first layer, ``[B, H, N, d]``; None in that layer, which is plain attention.
        alpha: weight of the difference.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout; the difference is not dropped.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; α (v⁰ - v) in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or there is not one query for each key.

    Example:
        >>> import torch
        >>> from attnswap.functional import neutreno_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> neutreno_attention(q, k, v, first_value=v, alpha=0.6).shape
        torch.Size([1, 3, 5, 8])
    """
    check_self_attention("neutreno", q, k)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    out = attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)
    return out if first_value is None else out + alpha * (first_value - v)


@register_mechanism("neutreno")
class NeutrenoAttention(TensorMechanism):
    """:func:`neutreno_attention` as a mechanism, for all layers of a stack; the first of them is plain attention.

    Args:
        spec: the layer that it serves.
        alpha: weight of the difference; the published runs use 0.6 for images and 0.4 for text. 0 is plain attention.

    Raises:
        ValueError: if ``alpha`` is negative or no number.
    """

    function = staticmethod(neutreno_attention)
    one_query_per_key = True
    per_head = ()
    needs = ("first_value",)
    neutral: ClassVar = {"alpha": 0.0}

    def __init__(self, spec: AttentionSpec, alpha: float = 0.6) -> None:
        super().__init__(spec)
        self.alpha = check_number("alpha", alpha, at_least=0.0)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"

    def tensors(self, k: Tensor, first_value: Tensor | None = None) -> tuple[Any, ...]:
        return first_value, self.alpha

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """softmax(q kᵀ · scale + mask); the difference is added to what it has mixed."""
        return kernel_maps(self, q, k, v, **given)[-1]
