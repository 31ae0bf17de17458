"""Learned features in place of softmax (Hedgehog: Zhang et al., ICLR 2024; LoLCATs: Zhang et al., ICLR 2025)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import Causality, State
from attention_modules.kernels import without_autocast
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.linear.band import Band, past_tokens
from attention_modules.mechanisms.linear.operator import linear_operator
from attention_modules.mechanisms.linear.stateful import S, StatefulMechanism, dropped, mix_by_features, state_of
from attention_modules.mechanisms.shared.options import check_choice, check_integer, check_number
from attention_modules.precision import scaled_logits

LEAST = 1e-12  # of a feature, as in the released code


def hedgehog_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    alpha: Tensor | None = None,
    window: int = 0,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), where φ(x) is the softmax of y and that of -y, y = x W.

    With a ``window`` (LoLCATs, "sw") the last keys are weighted by γ exp(z_ij - m_i) in place of the features' product,
    with softmax's logits z, their largest m_i in the window, and γ = σ(α): up to ``window`` tokens that is softmax.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        q_weight: W of the queries, ``[H, d, f]``.
        k_weight: W of the keys, ``[H, d, f]``.
        alpha: logits of γ, ``[H]``, where there is a window.
        window: how many of the last keys have softmax's weights; 0 for none.
        attn_mask: of tokens that are there, ``[B, 1, 1, N]``, alone or with the causal triangle ``[B, 1, N, N]``.
        is_causal: whether the future is hidden; with a window it must be.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on the logits, 1/sqrt(d) where None; for the features, another one is a factor of the query.
        state: of earlier tokens, empty before the first; it is filled with what stands for all tokens so far.
        starts: before which tokens the state is emptied, boolean ``[B, N]``.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape or number does not fit, or a window or state is used where the future is seen.

    Example:
        >>> import torch
        >>> from attnswap.functional import hedgehog_attention
        >>> q, k, v = torch.randn(3, 1, 3, 50, 8)
        >>> w = torch.randn(3, 8, 4)
        >>> hedgehog_attention(q, k, v, w, w, is_causal=True).shape
        torch.Size([1, 3, 50, 8])
    """
    check_integer("window", window, at_least=0)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dim() != 3 or weight.shape[:2] != (q.shape[1], q.shape[3]):
            raise ValueError(f"{name} must be [H, d, f] = ({q.shape[1]}, {q.shape[3]}, f), got {tuple(weight.shape)}")
    factor = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
    if window == 0:
        return mix_by_features(
            "hedgehog",
            hedgehog_features(q, q_weight, factor),
            hedgehog_features(k, k_weight),
            v,
            LEAST,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=dropout_p,
            state=state,
            starts=starts,
        )
    if alpha is None or alpha.shape != q.shape[1:2]:
        shown = None if alpha is None else tuple(alpha.shape)
        raise ValueError(f"alpha must be [H] = ({q.shape[1]},) where there is a window, got {shown}")
    tokens = past_tokens("hedgehog", attn_mask, is_causal, q, k)
    band = Band("hedgehog", k, dropped(v, dropout_p), window, 0, tokens, starts, state)
    left, values, gone = band.leaving()
    query, key = hedgehog_features(q, q_weight, factor), hedgehog_features(left, k_weight)
    before = state_of("hedgehog", state, query, v.shape[-1] + 1)
    given = {"scale": 1.0, "tokens": gone[:, None], "starts": starts, "initial_state": before}
    far, last = linear_operator(query, key, F.pad(values.to(key.dtype), (0, 1), value=1.0), **given)  # type: ignore[arg-type]
    both = far + _near(q, band, alpha, scale)
    if state is not None:
        band.write(state)
        state[S] = last
    total = both[..., -1:]
    return (both[..., :-1] / torch.where(total > 0, total, 1.0)).to(v.dtype)


def hedgehog_features(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """The softmax of x W and that of -x W beside each other, ``[B, H, N, 2f]`` in at least float32."""
    with without_autocast(x.device):
        wide = torch.promote_types(x.dtype, torch.float32)
        y = (x.to(wide) * factor) @ weight.to(wide)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).clamp(min=LEAST)


def _near(q: Tensor, band: Band, alpha: Tensor, scale: float | None) -> Tensor:
    """Σ_j γ exp(z_ij - m_i) v_j over the window, and the same of ones: ``[B, H, N, d + 1]``."""
    if q.shape[2] == 0:
        return band.v.new_zeros(*q.shape[:3], band.v.shape[-1] + 1)
    queries, keys, values, seen = band.blocks(q)
    with without_autocast(q.device):
        z = scaled_logits(queries, keys, scale)
        top = z.masked_fill(~seen, torch.finfo(z.dtype).min / 2).amax(-1, keepdim=True)
        weights = (z - top).masked_fill(~seen, float("-inf")).exp() * torch.sigmoid(alpha.to(z.dtype)).view(-1, 1, 1)
        return band.whole(weights @ F.pad(values.to(z.dtype), (0, 1), value=1.0))


@register_mechanism("hedgehog")
class HedgehogAttention(StatefulMechanism):
    """:func:`hedgehog_attention` as a mechanism, with a feature map of each query head's own.

    Args:
        spec: the layer that it serves.
        window: how many of the last keys have softmax's weights, as in LoLCATs, which takes 64; 0 for none.
        features: f, half the number of features; 64 as in the released code.
        start: of the feature maps: ``"uniform"``, as released, with which all tokens weigh nearly the same;
            ``"identity"``, where f is the heads' width.
        alpha: start of the window's factor γ = σ(α); -2.197 is 0.1, as released.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function = staticmethod(hedgehog_attention)
    causality: Causality = "any"
    per_head: tuple[str, ...] | None = ("q_weight", "k_weight", "alpha")
    neutral: ClassVar = {"window": 1024}

    def __init__(
        self, spec: AttentionSpec, window: int = 0, features: int = 64, start: str = "uniform", alpha: float = -2.197
    ) -> None:
        super().__init__(spec)
        self.window = check_integer("window", window, at_least=0)
        sizes = (spec.num_heads, spec.head_dim, check_integer("features", features, at_least=1))
        self.q_weight, self.k_weight = (nn.Parameter(torch.empty(sizes)) for _ in range(2))
        if check_choice("start", start, ("uniform", "identity")) == "identity" and features != spec.head_dim:
            raise ValueError(
                f"start='identity' needs as many features as a head is wide: give features={spec.head_dim}, or take "
                f"start='uniform' (got features={features})"
            )
        for weight in (self.q_weight, self.k_weight):
            if start == "identity":
                with torch.no_grad():
                    weight.copy_(torch.eye(features))
            else:
                nn.init.kaiming_uniform_(weight)
        check_number("alpha", alpha)
        self.alpha = nn.Parameter(torch.full((spec.num_heads,), alpha)) if window else None
        if window:
            self.causality = "always"
        else:
            self.per_head = ("q_weight", "k_weight")

    def extra_repr(self) -> str:
        return f"window={self.window}, features={self.q_weight.shape[-1]}"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, self.q_weight, self.k_weight, self.alpha, self.window
