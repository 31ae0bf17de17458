"""The delta rule: each token replaces what its key stands for in the state (Yang et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from attention_modules.base import AttentionSpec, State
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.stateful import NormedMechanism, Output, mix_by_state, of_each_head, unit
from attention_modules.mechanisms.shared.options import check_flag


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ, o_t = scale · S_tᵀ q_t (DeltaNet, Yang et al., NeurIPS 2024).

    Args:
        q, k: ``[B, H, N, d]``; keys of length 1, as with longer ones the state may grow without bound.
        v: ``[B, H, N, d']``.
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
        >>> from attnswap.functional import delta_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> delta_attention(q, F.normalize(k, dim=-1), v, torch.rand(1, 3, 5), is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    return mix_by_state(
        "delta",
        q,
        k,
        v,
        beta=beta,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        state=state,
        starts=starts,
    )


@register_mechanism("delta")
class DeltaAttention(NormedMechanism):
    """:func:`delta_attention` of queries and keys of length 1 with β = σ(W_b x), and RMSNorm of each head.

    Args:
        spec: the layer that it serves.
        negative: whether β = 2 σ(W_b x), so that the state's factor may be negative.
        output: ``"norm"`` as published, ``"gated"`` (times silu(W_g x)), or ``"plain"``.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function: ClassVar[Callable[..., Tensor]] = staticmethod(delta_attention)
    needs = ("x",)
    own_logits: ClassVar = "it normalizes queries and keys, and has no softmax"
    of_heads: ClassVar[tuple[str, ...]] = ("beta.weight",)

    def __init__(self, spec: AttentionSpec, negative: bool = False, output: Output = "norm") -> None:
        super().__init__(spec, output)
        self.negative = check_flag("negative", negative)
        self.beta = nn.Linear(spec.dim, spec.num_heads, bias=False)

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        beta = of_each_head(self.beta(self.needed("x", x)), q.shape[1]).squeeze(-1).sigmoid()
        return unit(q), unit(k), v, beta * (1 + self.negative)
