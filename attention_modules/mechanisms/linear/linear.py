"""Linear attention: the weights are a product of features, elu + 1 (Katharopoulos et al., ICML 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.base import AttentionSpec, State
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.stateful import StatefulMechanism, mix_by_features
from attention_modules.mechanisms.shared.options import check_number


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-6,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """φ(q_i)·Σ_j φ(k_j) v_jᵀ / (φ(q_i)·Σ_j φ(k_j) + ε) with φ = elu + 1 (Katharopoulos et al., ICML 2020).

    Args:
        q, k: ``[B, H, N, d]``.
        v: ``[B, H, N, d']``.
        eps: ε, 1e-6 in the released code.
        attn_mask: of padding, boolean (True = may be seen) or additive, alone or with the causal triangle in each row.
        is_causal: row i sees keys 0 to i only.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on q in units of 1/sqrt(d), before φ; the published form has none, as None has.
        state: of causal calls: what stands for all earlier tokens, empty before the first; it is filled.
        starts: of causal calls: before which tokens the state is emptied, boolean ``[B, N]`` (packed sequences).

    Returns:
        ``[B, H, N, d']``.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape or the mask does not fit, or a call that sees the future has a state.

    Example:
        >>> import torch
        >>> from attnswap.functional import linear_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> linear_attention(q, k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    return mix_by_features(
        "linear",
        F.elu(q.to(wide) * factor) + 1,
        F.elu(k.to(wide)) + 1,
        v,
        eps,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        state=state,
        starts=starts,
    )


@register_mechanism("linear")
class LinearAttention(StatefulMechanism):
    """:func:`linear_attention` as a mechanism.

    Args:
        spec: the layer that it serves.
        eps: what is added to the sum of the weights.

    Raises:
        ValueError: if ``eps`` is out of its limits.
    """

    function = staticmethod(linear_attention)
    causality = "any"
    per_head = ()

    def __init__(self, spec: AttentionSpec, eps: float = 1e-6) -> None:
        super().__init__(spec)
        self.eps = check_number("eps", eps, above=0.0)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, self.eps
