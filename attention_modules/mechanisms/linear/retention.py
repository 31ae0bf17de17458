"""Retention: a state that fades at a fixed pace in each head (Sun et al., 2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.base import AttentionSpec, State
from attention_modules.kernels import without_autocast
from attention_modules.masks import tokens_of
from attention_modules.mechanism import register_mechanism
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.mechanisms.linear.stateful import NormedMechanism, Output, dropped, mix_by_state, refuse_state


def retention_attention(
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
    """scale · Σ_j e^{a abs(i - j)} (q_i·k_j) v_j, over j <= i where the future is hidden (Sun et al., 2023, eq. 5).

    A token that a mask hides does not count in the distance.

    Args:
        q, k: ``[B, H, N, d]``.
        v: ``[B, H, N, d']``.
        log_decay: a, the natural logarithm of what each head keeps of the state from token to token, ``[H]``.
        attn_mask: of padding, boolean (True = may be seen) or additive, alone or with the causal triangle in each row.
        is_causal: row i sees keys 0 to i only.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on the output, 1/sqrt(d) where None.
        state: of causal calls: what stands for all earlier tokens, empty before the first; it is filled.
        starts: of causal calls: before which tokens the state is emptied, boolean ``[B, N]`` (packed sequences).

    Returns:
        ``[B, H, N, d']``.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape or the mask does not fit, or a call that sees the future has a state.

    Example:
        >>> import torch
        >>> from attnswap.functional import retention_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> retention_attention(q, k, v, -torch.rand(3), is_causal=True).shape
        torch.Size([1, 3, 5, 8])
    """
    given: dict[str, Any] = {"scale": scale, "state": state, "starts": starts}
    tokens, is_causal = tokens_of("retention", attn_mask, is_causal, q, k)
    if is_causal or q.shape[-2] == 1:
        mask = None if tokens is None else tokens.unsqueeze(-2)
        return mix_by_state(
            "retention", q, k, v, log_decay, attn_mask=mask, is_causal=True, dropout_p=dropout_p, **given
        )
    refuse_state("retention", state, starts)
    wide, dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32), v.dtype
    v = dropped(v, dropout_p).to(wide)
    ahead, _ = linear_operator(q, k, v, log_decay, scale=scale, tokens=tokens)
    turned = None if tokens is None else tokens.flip(2)
    behind, _ = linear_operator(q.flip(2), k.flip(2), v.flip(2), log_decay, scale=scale, tokens=turned)
    with without_autocast(q.device):  # the token itself is in both
        weight = (q.to(wide) * k.to(wide)).sum(-1, keepdim=True) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weight = weight if tokens is None else weight.masked_fill(~tokens.unsqueeze(-1), 0.0)
        return (ahead + behind.flip(2) - weight * v).to(dtype)


def decays(heads: int, like: Tensor) -> Tensor:
    """ln(1 - 2^(-5 - h)) of each head h as published, in at least float32."""
    head = torch.arange(heads, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return torch.log1p(-torch.exp2(-5.0 - head))


@register_mechanism("retention")
class RetentionAttention(NormedMechanism):
    """:func:`retention_attention` with the published decays, 1 - 2^(-5 - h) in head h, and RMSNorm of each head.

    Args:
        spec: the layer that it serves.
        output: ``"norm"``, ``"gated"`` as published (times silu(W_g x)), or ``"plain"``.

    Raises:
        ValueError: if ``output`` is unknown.
    """

    function = staticmethod(retention_attention)
    causality = "any"

    def __init__(self, spec: AttentionSpec, output: Output = "norm") -> None:
        super().__init__(spec, output)
        self.per_head = None  # the pace of a head goes by its number

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, decays(q.shape[1], q)
