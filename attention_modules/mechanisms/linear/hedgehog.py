"""Learned features in place of softmax (Hedgehog: Zhang et al., ICLR 2024; LoLCATs: Zhang et al., ICLR 2025)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import State
from attention_modules.kernels import without_autocast
from attention_modules.masks import tokens_of
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.linear.band import Band, past_tokens
from attention_modules.mechanisms.linear.kernel_sums import kernel_sums, ratio
from attention_modules.mechanisms.linear.stateful import S, StatefulMechanism, dropped, of_state, refuse_state
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
    dtype, values = v.dtype, dropped(v, dropout_p)
    factor = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
    if window == 0:
        tokens, is_causal = tokens_of("hedgehog", attn_mask, is_causal, q, k)
        if not is_causal and q.shape[-2] > 1:
            refuse_state("hedgehog", state, starts)
        past = is_causal or q.shape[-2] == 1
        given: dict[str, Any] = {"is_causal": past, "tokens": tokens, "starts": starts}
        features = hedgehog_features(q, q_weight, factor), hedgehog_features(k, k_weight)
        sums, total, last = kernel_sums(*features, values, initial_state=of_state("hedgehog", state), **given)
        if state is not None:
            state[S] = last
        return ratio(sums, total, dtype)
    if alpha is None or alpha.shape != q.shape[1:2]:
        shown = None if alpha is None else tuple(alpha.shape)
        raise ValueError(f"alpha must be [H] = ({q.shape[1]},) where there is a window, got {shown}")
    seen = past_tokens("hedgehog", attn_mask, is_causal, q, k)
    if q.shape[2] == 0:
        return torch.zeros_like(v)
    before = of_state("hedgehog", state)
    band = Band(k, values, window, 0, seen, starts, state)
    left, left_values, gone = band.leaving()
    features = hedgehog_features(q, q_weight, factor), hedgehog_features(left, k_weight)
    given = {"is_causal": True, "tokens": gone[:, None], "starts": starts, "initial_state": before}
    sums, total, last = kernel_sums(*features, left_values, **given)
    near, weight = _near(q, band, alpha, scale)
    if state is not None:
        band.write(state)
        state[S] = last
    return ratio(sums + near, total + weight, dtype)


def hedgehog_features(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """The softmax of x W and that of -x W beside each other, ``[B, H, N, 2f]`` in at least float32."""
    with without_autocast(x.device):
        wide = torch.promote_types(x.dtype, torch.float32)
        y = (x.to(wide) * factor) @ weight.to(wide)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).clamp(min=LEAST)


def _near(q: Tensor, band: Band, alpha: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Σ_j γ exp(z_ij - m_i) v_j over the window, ``[B, H, N, d]``, and the same without v, ``[B, H, N, 1]``."""
    queries, keys, values, seen = band.blocks(q)
    with without_autocast(q.device):
        z = scaled_logits(queries, keys, scale)
        lowest = torch.finfo(z.dtype).min / 2  # -inf would be NaN in rows that see nothing
        top = z.masked_fill(~seen, lowest).amax(-1, keepdim=True)
        weights = (z - top).masked_fill(~seen, float("-inf")).exp() * torch.sigmoid(alpha.to(z.dtype)).view(-1, 1, 1)
        return band.whole(weights @ values.to(z.dtype)), band.whole(weights.sum(-1, keepdim=True))


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
    one_query_per_key = True
    causality: ClassVar = "any"
    per_head = ("q_weight", "k_weight", "alpha")
    neutral: ClassVar = {"window": 2**20}

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
        if not window:
            self.per_head = ("q_weight", "k_weight")

    def extra_repr(self) -> str:
        return f"window={self.window}, features={self.q_weight.shape[-1]}"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, self.q_weight, self.k_weight, self.alpha, self.window
