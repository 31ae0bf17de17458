"""Sinkhorn attention: maps that are nearly doubly stochastic (Sander et al., AISTATS 2022)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from attention_modules.kernels import without_autocast
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import row_slices
from attention_modules.mechanisms.shared.columns import attend_with_key_bias
from attention_modules.mechanisms.shared.options import MOST_REPEATS, check_flag, check_integer
from attention_modules.mechanisms.shared.padding import padding_alone, refuse_causal, refuse_causality
from attention_modules.mechanisms.symmetric import check_self_attention
from attention_modules.precision import scaled_logits

CHUNK = 256  # rows whose logits are held at once


def check_iterations(iterations: int) -> int:
    """The number of normalizations.

    Raises:
        ValueError: if it is not odd, positive and at most 1,000.
    """
    if check_integer("iterations", iterations, at_least=1, at_most=MOST_REPEATS) % 2 == 0:
        raise ValueError(f"iterations must be odd, so that the rows are normalized last, got {iterations}")
    return iterations


def row_logsumexp(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    """ln Σ_j exp(q kᵀ · scale + bias_j) of each row, ``[B, H, N]``, with the logits of a few rows in memory at once."""
    slices = row_slices(q.shape[-2], CHUNK)
    return torch.cat(
        [(scaled_logits(q[..., here, :], k, scale) + bias.unsqueeze(-2)).logsumexp(-1) for here in slices], -1
    )


def column_potential(q: Tensor, k: Tensor, bias: Tensor, iterations: int, scale: float, detach: bool = True) -> Tensor:
    """The logarithms g_j that the columns are multiplied with, ``[B, H, M]``, after the column steps of Sinkhorn.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        bias: of the keys, and -inf for tokens that are hidden, ``[B|1, H|1, N]``.
        iterations: normalizations, rows and columns in turn.
        scale: factor on the logits.
        detach: whether they have no gradient.
    """
    with torch.no_grad() if detach else nullcontext(), without_autocast(q.device):
        dtype = torch.promote_types(q.dtype, torch.float32)
        # Detached, as no_grad does not stop derivatives in forward mode.
        q, k, bias = ((x.detach() if detach else x).to(dtype) for x in (q, k, bias))
        hidden = bias.isneginf()  # a token that is hidden as a key is none as a query
        hidden = hidden & ~hidden.all(-1, keepdim=True)  # where no token is left, any factors will do
        bias = bias.masked_fill(bias.isneginf() & ~hidden, 0.0)
        g = torch.zeros(k.shape[:-1], dtype=dtype, device=k.device)
        for _ in range((iterations - 1) // 2):
            f = (-row_logsumexp(q, k, bias + g, scale)).masked_fill(hidden, float("-inf"))
            g = -row_logsumexp(k, q, f, scale) - bias.masked_fill(hidden, 0.0)
        return g


def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iterations: int = 3,
    *,
    detach: bool = True,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """A v, A = exp(q kᵀ · scale) with rows and columns normalized in turn (Sinkformer, Sander et al., AISTATS 2022).

    After an odd number of normalizations, this is softmax attention with a bias per key. As in the released code, the
    gradient goes through the last normalization of the rows alone, unless ``detach`` is False.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        iterations: normalizations, an odd number; 1 is softmax attention.
        detach: whether the factors of the columns have no gradient; where False, backward holds the logits.
        attn_mask: padding alone, boolean (True = may be seen) or additive, broadcastable to ``[B, H, 1, N]``.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, rows would see different keys, there is not one query for each key, or
            ``iterations`` is not odd, positive and at most 1,000.

    Example:
        >>> import torch
        >>> from attnswap.functional import sinkhorn_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> sinkhorn_attention(q, k, v, iterations=3).shape
        torch.Size([1, 3, 5, 8])
    """
    check_iterations(iterations)
    check_self_attention("sinkhorn", q, k)
    attn_mask = padding_alone("sinkhorn", attn_mask, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = q.new_zeros(1, 1, 1)
    if attn_mask is not None:
        bias = attn_mask.squeeze(-2)
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, device=q.device, dtype=q.dtype).masked_fill(~bias, float("-inf"))
    g = column_potential(q, k, bias.expand(*bias.shape[:-1], k.shape[-2]), iterations, scale, detach)
    return attend_with_key_bias(q, k, v, g, attn_mask, False, dropout_p, scale)


@register_mechanism("sinkhorn")
class SinkhornAttention(AttentionMechanism):
    """:func:`sinkhorn_attention` as a mechanism, for attention that is not causal.

    Args:
        spec: the layer that it serves.
        iterations: normalizations, an odd number; the paper uses 3 for text and 5 for images, 1 is softmax attention.
        detach: whether the factors of the columns have no gradient, as in the released code. Where False, the gradient
            is that of the output (Lipschitz constants need it), and backward holds N × N logits.

    Raises:
        ValueError: if ``iterations`` is not odd, positive and at most 1,000, ``detach`` is neither True nor False, or
            the layer is causal.
    """

    one_query_per_key = True
    row_masks = False
    per_head = ()
    neutral: ClassVar = {"iterations": 1}

    def __init__(self, spec: AttentionSpec, iterations: int = 3, detach: bool = True) -> None:
        super().__init__(spec)
        self.iterations = check_iterations(iterations)
        self.detach = check_flag("detach", detach)
        refuse_causal("sinkhorn", spec)

    @property
    def surrogate_gradient(self) -> bool:  # type: ignore[override]
        """Whether its iterations before the last are detached."""
        return self.detach and self.iterations > 1

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}" + ("" if self.detach else ", detach=False")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Mix the values.

        Raises:
            ValueError: if attention is causal or a mask tells rows apart.
        """
        refuse_causality("sinkhorn", is_causal)
        return sinkhorn_attention(
            q, k, v, self.iterations, detach=self.detach, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale
        )
