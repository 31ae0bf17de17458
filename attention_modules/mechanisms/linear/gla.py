"""Gated linear attention: a state of which each channel fades at its own pace (Yang et al., ICML 2024)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import AttentionSpec, State
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.stateful import NormedMechanism, Output, mix_by_state, of_each_head
from attention_modules.mechanisms.shared.options import check_integer, check_number


def gla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """S_t = e^{a_t} ⊙ S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t (GLA, Yang et al., ICML 2024, eq. 3).

    Args:
        q, k: ``[B, H, N, d]``.
        v: ``[B, H, N, d']``.
        log_decay: natural logarithm of what each channel keeps of the state, 0 or less, ``[B, H, N, d]``.
        attn_mask: of padding, boolean (True = may be seen) or additive, alone or with the causal triangle in each row.
        is_causal: row i sees keys 0 to i only; must hold, as itself or in the mask.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on the output, 1/sqrt(d) where None.
        state: what stands for all earlier tokens, empty before the first; what stands for all is written into it.
        starts: before which tokens the state is emptied, boolean ``[B, N]`` (packed sequences).

    Returns:
        ``[B, H, N, d']``.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if the future is not hidden, or a shape or the mask does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import gla_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> gla_attention(q, k, v, -torch.rand(1, 3, 5, 8), is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    return mix_by_state(
        "gla",
        q,
        k,
        v,
        log_decay,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        state=state,
        starts=starts,
    )


@register_mechanism("gla")
class GatedLinearAttention(NormedMechanism):
    """:func:`gla_attention` with a = ln σ(W₂ W₁ x + b) / 16, and RMSNorm of each head.

    Args:
        spec: the layer that it serves.
        rank: rows of W₁.
        divisor: of the logarithm, 16 as published; the larger, the longer the memory at the start.
        output: ``"norm"``, ``"gated"`` as published (times silu(W_g x)), or ``"plain"``.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function = staticmethod(gla_attention)
    needs = ("x",)
    of_heads = ("decay.1.weight", "decay.1.bias")

    def __init__(self, spec: AttentionSpec, rank: int = 16, divisor: float = 16.0, output: Output = "norm") -> None:
        super().__init__(spec, output)
        rank = check_integer("rank", rank, at_least=1)
        self.divisor = check_number("divisor", divisor, above=0.0)
        self.decay = nn.Sequential(
            nn.Linear(spec.dim, rank, bias=False), nn.Linear(rank, spec.num_heads * spec.head_dim)
        )

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        logits = of_each_head(self.decay(self.needed("x", x)), q.shape[1])
        return q, k, v, F.logsigmoid(logits) / self.divisor
