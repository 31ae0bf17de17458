"""Kimi delta attention: the delta rule on a state of which each channel fades at its own pace (Kimi Team, 2025)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attention_modules.base import AttentionSpec, State
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.delta import DeltaAttention
from attention_modules.mechanisms.linear.gated_delta import add_decay, decay_of
from attention_modules.mechanisms.linear.stateful import Output, mix_by_state


def kda_attention(
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
    """S_t = (I - β_t k_t k_tᵀ) (e^{a_t} ⊙ S_{t-1}) + β_t k_t v_tᵀ, o_t = scale · S_tᵀ q_t (KDA, Kimi Team, 2025).

    Args:
        q, k: ``[B, H, N, d]``; keys of length 1, as with longer ones the state may grow without bound.
        v: ``[B, H, N, d']``.
        log_decay: natural logarithm of what each channel keeps of the state, 0 or less, ``[B, H, N, d]``.
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
        >>> from attnswap.functional import kda_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> k, a, beta = F.normalize(k, dim=-1), -torch.rand(1, 3, 5, 8), torch.rand(1, 3, 5)
        >>> kda_attention(q, k, v, a, beta, is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    return mix_by_state(
        "kda",
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


@register_mechanism("kda")
class KimiDeltaAttention(DeltaAttention):
    """:func:`kda_attention` with a = -e^A softplus(W₂ W₁ x + b) per channel, β = σ(W_b x), and RMSNorm of each head.

    At the start e^A is uniform between 1 and 16, and softplus(b) log-uniform between 0.001 and 0.1.

    Args:
        spec: the layer that it serves.
        negative: whether β = 2 σ(W_b x), so that the state's factor may be negative.
        output: ``"norm"``, ``"gated"`` (times σ(W_g x); the published gate has rank d), or ``"plain"``.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function = staticmethod(kda_attention)
    of_heads = ("beta.weight", "decay.1.weight", "decay_bias", "log_rate")
    decay_bias: nn.Parameter
    log_rate: nn.Parameter

    def __init__(self, spec: AttentionSpec, negative: bool = False, output: Output = "norm") -> None:
        super().__init__(spec, negative, output)
        heads, width = spec.num_heads, spec.head_dim
        self.decay = nn.Sequential(nn.Linear(spec.dim, width, bias=False), nn.Linear(width, heads * width, bias=False))
        add_decay(self, heads * width, heads, slowest=1.0)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        *rest, beta = super().tensors(q, k, v, x)
        return *rest, decay_of(self.decay(x), self.decay_bias, self.log_rate), beta

    def activation(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()
