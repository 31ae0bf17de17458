"""Elliptical attention: distances stretched along the features that change between layers (Nielsen et al., 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend, without_autocast
from attention_modules.masks import combine_masks, hide, visible
from attention_modules.mechanism import AttentionSpec, register_mechanism


def elliptical_weights(
    v: Tensor, previous_value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """m / max m, m the mean absolute change of each feature of the values over the keys that a row sees.

    Args:
        v: values ``[B, H, M, d]``.
        previous_value: those of the layer before, ``[B, H, M, d]``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``, not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.

    Returns:
        ``[B, H, N or 1, d]`` in [0, 1], at least float32, without a gradient; 1 where nothing changes.
    """
    with torch.no_grad(), without_autocast(v.device):
        dtype = torch.promote_types(v.dtype, torch.float32)
        # Detached, as no_grad does not stop derivatives in forward mode.
        change = (v.detach().to(dtype) - previous_value.detach().to(dtype)).abs()
        if is_causal:  # a mean over all tokens would leak the future, as the released language model does
            counts = torch.arange(1, v.shape[-2] + 1, device=v.device, dtype=dtype)
            mean = change.cumsum(-2) / counts.view(-1, 1)
        elif attn_mask is None:
            mean = change.sum(-2, keepdim=True) / max(v.shape[-2], 1)
        else:
            none = change.new_zeros(())
            query = none.expand(*change.shape[:2], attn_mask.shape[-2], change.shape[-1])
            mean = attend(query, none.expand_as(change), change, visible(attn_mask))
        largest = mean.amax(-1, keepdim=True)
        return torch.where(largest == 0, torch.ones_like(mean), mean / largest)  # NaN stays NaN


def elliptical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous_value: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax((q ∘ w) kᵀ · scale + mask) v, w of ``elliptical_weights`` (Nielsen et al., NeurIPS 2024).

    The released code for images has w of all tokens; under a mask each row has it of the keys that it sees (our
    reading: all tokens would leak the future).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        previous_value: values of the layer before, ``[B, H, M, d]``; None in the first, which is plain attention.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or values are not as wide as keys.

    Example:
        >>> import torch
        >>> from attnswap.functional import elliptical_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> elliptical_attention(q, k, v, previous_value=k).shape
        torch.Size([1, 3, 5, 8])
    """
    if previous_value is not None and v.shape[-1] != q.shape[-1]:
        raise ValueError(f"elliptical attention needs values as wide as keys, got {v.shape[-1]} and {q.shape[-1]}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    if previous_value is not None:
        q = (q * elliptical_weights(v, previous_value, attn_mask, is_causal)).to(q.dtype)
    return attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("elliptical")
class EllipticalAttention(TensorMechanism):
    """:func:`elliptical_attention` as a mechanism, for all layers of a stack; the first is plain attention.

    Args:
        spec: the layer that it serves.

    Raises:
        ValueError: if its heads have values and keys of different widths.
    """

    function = staticmethod(elliptical_attention)
    needs = ("previous_value",)
    surrogate_gradient = True
    per_head = ()

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.value_dim not in (None, spec.head_dim):
            raise ValueError(
                f"elliptical attention stretches keys by the spread of values, and this layer's heads have them of "
                f"different widths ({spec.head_dim} and {spec.value_dim}); use a mechanism that keeps them apart"
            )
        super().__init__(spec)

    own_logits: ClassVar = "it weights the features of queries and keys"

    def tensors(self, k: Tensor, previous_value: Tensor | None = None) -> tuple[Any, ...]:
        return (previous_value,)
