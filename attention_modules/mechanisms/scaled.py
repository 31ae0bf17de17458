"""Scaled Attention: values corrected before ordinary softmax attention (Teo and Nguyen, NeurIPS 2024)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide, visible
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import first_square
from attention_modules.mechanisms.shared.options import check_length, check_table, spec_of_length
from attention_modules.mechanisms.symmetric import check_self_attention

Variant = Literal["matrix", "scalar"]


def apply_matrix(s: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """S v a head, with S restricted to the keys that each row sees.

    Args:
        s: ``[H, N, N]``.
        v: values ``[B, H, N, d]``.
        attn_mask: boolean or additive, ``[B|1, H|1, N|1, N|1]``, or None.
        is_causal: row i sees keys 0 to i only.

    Returns:
        ``[B, H, N, d]``.
    """
    s = s.to(v.dtype)
    if is_causal:
        s = s.tril()
    if attn_mask is not None:
        seen = visible(attn_mask)
        if seen.shape[0] == 1:
            s = s * seen[0]
        elif seen.shape[2] == 1:  # padding: hide values, not a matrix a sample
            v = v * seen.transpose(-2, -1)
        else:
            return (s * seen) @ v
    batch, heads, tokens, width = v.shape
    flat = v.permute(1, 2, 0, 3).reshape(heads, tokens, batch * width)
    return (s @ flat).view(heads, tokens, batch, width).permute(2, 0, 1, 3)


def scaled_values(
    k: Tensor,
    v: Tensor,
    s: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(I - S) v, the values that :func:`scaled_attention` mixes; its arguments, masks as for :func:`apply_matrix`."""
    if s.dim() == 3:
        return v - apply_matrix(s, v, attn_mask, is_causal).to(v.dtype)
    return v - (s * attend(k, k, v, attn_mask, is_causal, scale=scale)).to(v.dtype)


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) (I - S) v (Scaled Attention of Teo and Nguyen, NeurIPS 2024, and their released code).

    Under a mask, S and the softmax inside it are restricted to what each row sees (our reading: a full S
    would leak the future).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        s: the matrix S itself, ``[H, N, N]``, or a scalar s (one number), for which S = s · softmax(k kᵀ · scale).
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout, in the outer softmax only.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError, ValueError: if the mask's dtype or a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import scaled_attention, softmax_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> torch.equal(scaled_attention(q, k, v, torch.zeros(3, 5, 5)), softmax_attention(q, k, v))
        True
    """
    check_self_attention("scaled", q, k)
    heads, tokens = k.shape[-3:-1]
    if not (s.shape == (heads, tokens, tokens) if s.dim() == 3 else s.shape in ((), (1,))):
        raise ValueError(f"s must be a scalar or [heads, N, N] = {(heads, tokens, tokens)}, got {tuple(s.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    attn_mask = hide(attn_mask)
    return attend(q, k, scaled_values(k, v, s, attn_mask, is_causal, scale), attn_mask, is_causal, dropout_p, scale)


@register_mechanism("scaled")
class ScaledAttention(TensorMechanism):
    """:func:`scaled_attention` as a mechanism; at its initial s = 0 it is plain attention.

    Args:
        spec: the layer that it serves.
        variant: ``"matrix"``, S a free ``[H, N, N]``; ``"scalar"``, S = s · softmax(k kᵀ · scale), one s per layer.
        num_tokens: N of the matrix, that of ``spec`` where None. Sequences of fewer tokens use the first rows and
            columns of S, as learned positions do.

    Raises:
        ValueError: if the variant is unknown, or ``"matrix"`` does not know the number of tokens, or would have more
            than 2³² numbers.
    """

    function = staticmethod(scaled_attention)
    one_query_per_key = True
    neutral: ClassVar = {}

    def __init__(self, spec: AttentionSpec, variant: Variant = "matrix", num_tokens: int | None = None) -> None:
        if variant not in get_args(Variant):
            raise ValueError(f"variant must be one of {', '.join(map(repr, get_args(Variant)))}, got {variant!r}")
        shape: tuple[int, ...] = (1,)
        if variant == "matrix":
            learns = "scaled attention with variant='matrix' learns an N x N matrix"
            spec, longest = spec_of_length(spec, num_tokens, learns, ", or use variant='scalar'")
            shape = check_table((spec.num_heads, longest, longest), longest, ", or use variant='scalar'")
        super().__init__(spec)
        self.variant = variant
        self.counts_columns = variant == "matrix"
        self.per_head = ("s",) if variant == "matrix" else ()
        self.s = nn.Parameter(torch.zeros(shape))

    def extra_repr(self) -> str:
        return f"variant={self.variant!r}"

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return (self.s_of(k),)

    def s_of(self, k: Tensor) -> Tensor:
        """What :func:`scaled_attention` takes as ``s`` with these keys ``[B, H, N, d]``.

        Raises:
            ValueError: if there are more tokens than S has.
        """
        s: Tensor = self.s
        if self.variant == "scalar":
            return s
        tokens = k.shape[-2]
        check_length("scaled attention", tokens, s.shape[-1])
        return first_square(s, tokens)
