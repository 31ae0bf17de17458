"""Attention by a median of means: the middle one of a few random subsets of the keys (Han et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import visible
from attention_modules.mechanism import AttentionMechanism, AttentionSpec, register_mechanism
from attention_modules.mechanisms.keys.kde import normalized
from attention_modules.mechanisms.shared.options import MOST_REPEATS, check_integer, check_number
from attention_modules.mechanisms.shared.padding import padding_alone, refuse_causal, refuse_causality
from attention_modules.mechanisms.symmetric import check_self_attention


def mom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draws: Tensor,
    outliers: float = 0.05,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(-‖q - k̂‖² · scale) v over the keys of one of K subsets, the one whose likelihood is the median of theirs.

    k̂ are the keys of norm 1. A subset holds the share 1 - ``outliers`` of the keys; its likelihood is the sum of the
    logits over its keys, the queries and the heads (Han et al., NeurIPS 2023; released code, which also sums over the
    batch, so that there one sample's output depends on the others).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        draws: random numbers ``[K, N]``: subset i leaves out the keys with the largest ones of row i, whose first are
            those of the visible keys in their order.
        outliers: share of the keys that a subset leaves out.
        attn_mask: padding alone, boolean (True = may be seen) or additive, broadcastable to ``[B, 1, 1, N]``.
        dropout_p: attention dropout.
        scale: factor on the squared distances, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, rows would see different keys, there is not one query for each key, or an
            option is out of its limits.

    Example:
        >>> import torch
        >>> from attnswap.functional import mom_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> mom_attention(q, k, v, torch.rand(3, 5)).shape
        torch.Size([1, 3, 5, 8])
    """
    _check_outliers(outliers)
    check_self_attention("mom", q, k)
    attn_mask = padding_alone("mom", attn_mask, q, k)
    if draws.dim() != 2 or draws.shape[-1] != k.shape[-2]:
        raise ValueError(f"draws must be [K, N] with N = {k.shape[-2]} keys, got {tuple(draws.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = normalized(k)
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device) if attn_mask is None else visible(attn_mask)
    seen = seen.expand(*seen.shape[:-1], k.shape[-2])
    with torch.no_grad():
        kept = _median_subset(q, k, draws, outliers, seen)
    return attend(q, k, v, _both(attn_mask, kept), False, dropout_p, 2 * scale)


def _check_outliers(outliers: float) -> float:
    return check_number("outliers", outliers, at_least=0.0, at_most=0.5)


def _median_subset(q: Tensor, k: Tensor, draws: Tensor, outliers: float, seen: Tensor) -> Tensor:
    """Which keys stay, ``[B, H|1, 1, N]``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = torch.where(seen.transpose(-2, -1), q, 0.0).to(wide).sum(-2, keepdim=True)  # padding asks nothing
    likelihood = (rows * k.to(wide)).sum(-1)  # [B, H, N], but for what all keys have in common
    place = (seen.cumsum(-1) - 1).clamp(min=0).expand(-1, -1, draws.shape[0], -1)  # as in a sample without padding
    subsets = draws.to(wide).expand(place.shape).gather(-1, place).masked_fill(~seen, float("inf"))  # [B|1, H|1, K, N]
    size = (seen.sum(-1, keepdim=True, dtype=wide) * (1 - outliers)).floor().clamp(min=1.0)
    inside = (subsets.argsort(-1).argsort(-1) < size) & seen
    sums = torch.where(inside, likelihood.unsqueeze(-2), 0.0).sum((1, -1))  # [B, K]
    middle = sums.argsort(-1)[:, draws.shape[0] // 2]
    inside = inside.expand(q.shape[0], *inside.shape[1:])
    return inside.gather(-2, middle.view(-1, 1, 1, 1).expand(-1, inside.shape[1], 1, inside.shape[-1]))


def _both(attn_mask: Tensor | None, kept: Tensor) -> Tensor:
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return kept
    return attn_mask.masked_fill(~kept, float("-inf"))


@register_mechanism("mom")
class MedianOfMeansAttention(AttentionMechanism):
    """:func:`mom_attention` as a mechanism without parameters, for attention that is not causal.

    In training the subsets are drawn anew in each call. In evaluation they are the same in all, so that outputs repeat
    (our choice; the released code draws there too).

    Args:
        spec: the layer that it serves.
        subsets: how many are drawn, K.
        outliers: share of the keys that each leaves out.

    Raises:
        ValueError: if an option is out of its limits, or the layer is causal.
    """

    one_query_per_key = True
    row_masks = False
    own_logits: ClassVar = "they are squared distances of queries and normalized keys"
    stochastic = True

    def __init__(self, spec: AttentionSpec, subsets: int = 3, outliers: float = 0.05) -> None:
        super().__init__(spec)
        self.subsets = check_integer("subsets", subsets, at_least=1, at_most=MOST_REPEATS)
        self.outliers = _check_outliers(outliers)
        refuse_causal("mom", spec)

    def extra_repr(self) -> str:
        return f"subsets={self.subsets}, outliers={self.outliers}"

    def draws(self, k: Tensor) -> Tensor:
        """Numbers in [0, 1) that choose the subsets, ``[K, N]``: multiples of irrational numbers in evaluation."""
        if self.training:
            return torch.rand(self.subsets, k.shape[-2], device=k.device)
        steps = torch.arange(2, 2 + self.subsets, device=k.device, dtype=torch.float32).mul(2**0.5).frac()
        places = torch.arange(1, 1 + k.shape[-2], device=k.device, dtype=torch.float32)
        return (steps.unsqueeze(-1) * places).frac()

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
        refuse_causality("mom", is_causal)
        draws = self.draws(k)
        return mom_attention(q, k, v, draws, self.outliers, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
