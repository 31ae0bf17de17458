"""The gated delta rule: a state that fades before each token replaces a part of it (Yang et al., ICLR 2025)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import AttentionSpec, State
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.delta import DeltaAttention
from attention_modules.mechanisms.linear.stateful import Output, mix_by_state, of_each_head


def gated_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """S_t = (I - β_t k_t k_tᵀ) e^{a_t} S_{t-1} + β_t k_t v_tᵀ, o_t = scale · S_tᵀ q_t (Yang et al., ICLR 2025).

    Args:
        q, k: ``[B, H, N, d]``; keys of length 1, as with longer ones the state may grow without bound.
        v: ``[B, H, N, d']``.
        log_decay: natural logarithm of what each token keeps of the state, 0 or less, ``[B, H, N]``.
        beta: how much of what a key stands for is replaced, ``[B, H, N]``.
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
        >>> from torch.nn import functional as F
        >>> from attnswap.functional import gated_delta_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> k, a, beta = F.normalize(k, dim=-1), -torch.rand(1, 3, 5), torch.rand(1, 3, 5)
        >>> gated_delta_attention(q, k, v, a, beta, is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    return mix_by_state(
        "gated_delta",
        q,
        k,
        v,
        log_decay,
        beta,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        state=state,
        starts=starts,
    )


@register_mechanism("gated_delta")
class GatedDeltaAttention(DeltaAttention):
    """:func:`gated_delta_attention` with a = -e^A softplus(W_a x + b), β = σ(W_b x), and RMSNorm of each head.

    At the start e^A is uniform between 0 and 16, and softplus(b) log-uniform between 0.001 and 0.1.

    Args:
        spec: the layer that it serves.
        negative: whether β = 2 σ(W_b x), so that the state's factor may be negative.
        output: ``"norm"``, ``"gated"`` as published (times silu(W_g x)), or ``"plain"``.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function = staticmethod(gated_delta_attention)
    of_heads = ("beta.weight", "decay.weight", "decay_bias", "log_rate")
    decay_bias: nn.Parameter
    log_rate: nn.Parameter

    def __init__(self, spec: AttentionSpec, negative: bool = False, output: Output = "norm") -> None:
        super().__init__(spec, negative, output)
        self.decay = nn.Linear(spec.dim, spec.num_heads, bias=False)
        add_decay(self, spec.num_heads, spec.num_heads, slowest=0.0)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        *rest, beta = super().tensors(q, k, v, x)
        return *rest, decay_of(self.decay(x), self.decay_bias, self.log_rate).squeeze(-1), beta


def add_decay(mechanism: nn.Module, biases: int, heads: int, slowest: float) -> None:
    """b and A as published: softplus(b) log-uniform between 0.001 and 0.1, e^A uniform up to 16; not to be decayed."""
    steps = torch.empty(biases).uniform_(math.log(1e-3), math.log(0.1)).exp()
    rates = torch.empty(heads).uniform_(slowest, 16.0).clamp(min=1e-4)
    mechanism.decay_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
    mechanism.log_rate = nn.Parameter(rates.log())
    for parameter in (mechanism.decay_bias, mechanism.log_rate):  # once registered: accelerate makes them anew there
        parameter._no_weight_decay = True  # type: ignore[attr-defined]


def decay_of(logits: Tensor, bias: Tensor, log_rate: Tensor) -> Tensor:
    """-e^A softplus(logits + b), ``[B, H, N, w]`` in at least float32, of logits ``[B, N, H * w]``."""
    logits = of_each_head(logits, len(log_rate))
    bias = bias.to(logits.dtype).view(len(log_rate), 1, -1)
    return -log_rate.to(logits.dtype).exp().view(-1, 1, 1) * F.softplus(logits + bias)
