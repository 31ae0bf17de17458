"""Differentiable attention mask: a learned gate per head and distance (SparseBERT, Shi et al., ICML 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import TensorMechanism
from attention_modules.masks import combine_masks
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.chunks import exporting
from attention_modules.mechanisms.shared.options import check_length, check_number, check_table, spec_of_length
from attention_modules.mechanisms.shared.rows import softmax_with
from attention_modules.mechanisms.symmetric import check_self_attention

_CLOSED = -10_000  # added to a logit whose gate is 0; an integer for the same reason as HIDDEN of masks


def dam_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale - 10⁴ (1 - m_|i-j|) + mask) v (differentiable attention mask, Shi et al., ICML 2021).

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        gates: m of each head and distance, in [0, 1], ``[H, D]`` with D of at least N.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing. A row all of whose gates are 0 is a row without gates.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or there is not one query for each key.

    Example:
        >>> import torch
        >>> from attnswap.functional import dam_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> dam_attention(q, k, v, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]).expand(3, 5)).shape
        torch.Size([1, 3, 5, 8])
    """
    check_self_attention("dam", q, k)
    heads, tokens = k.shape[-3:-1]
    if gates.dim() != 2 or gates.shape[0] != heads or gates.shape[1] < tokens:
        raise ValueError(f"gates must be [H, D] with H = {heads} and D of at least {tokens}, got {tuple(gates.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    return softmax_with(_Gates(), gates, q, k, v, attn_mask, is_causal, dropout_p, scale)


def _differences(like: Tensor, rows: slice, columns: int) -> Tensor:
    """All j - i between some rows i and the columns j, in order."""
    return torch.arange(1 - rows.stop, columns - rows.start, device=like.device)


class _Gates:
    """A gate of each distance between positions."""

    def values(self, learned: Tensor, rows: slice, columns: int) -> Tensor:
        added = (1 - learned) * _CLOSED
        if exporting():  # unfold would fix the number of columns
            places = torch.arange(columns, device=learned.device)
            return added[:, (places[rows].unsqueeze(-1) - places).abs()]
        by_difference = added[:, _differences(learned, rows, columns).abs()]
        return by_difference.unfold(1, columns, 1).flip(1)  # the last row begins with the first difference

    def collect(self, slope: Tensor, gradient: Tensor, rows: slice) -> None:
        slope = slope.sum(0)  # [H, n, M]
        heads, number, columns = slope.shape
        differences = _differences(slope, rows, columns)
        skewed = nn.functional.pad(slope.flip(1), (0, number)).flatten(1)[:, : number * len(differences)]
        sums = skewed.view(heads, number, -1).sum(1)  # of each difference
        gradient.index_add_(1, differences.abs(), sums.to(gradient.dtype), alpha=-_CLOSED)


def dam_penalty(gates: Tensor) -> Tensor:
    """‖M‖₁ of the masks ``[H, D, D]`` with M_ij = m_|i-j|, in at least float32: the penalty of Shi et al. without λ.

    It closes gates that are open: at a gate of 0 its gradient is 0, as in the released code.

    Args:
        gates: m of each head and distance, in [0, 1], ``[H, D]``.

    Returns:
        A scalar.

    Example:
        >>> import torch
        >>> from attention_modules.mechanisms.maps.dam import dam_penalty
        >>> dam_penalty(torch.tensor([[1.0, 1.0, 0.0]]))  # three pairs of distance 0, and four of distance 1
        tensor(7.)
    """
    longest = gates.shape[-1]
    distance = torch.arange(longest, device=gates.device)
    pairs = torch.where(distance == 0, longest, 2 * (longest - distance))
    return (gates.to(torch.promote_types(gates.dtype, torch.float32)).abs() * pairs).sum()


@register_mechanism("dam")
class DifferentiableAttentionMask(TensorMechanism):
    """:func:`dam_attention` with gates that are learned: in training hard Gumbel draws, straight-through.

    In evaluation a gate is open where its logit is the larger one (our choice; the released code draws there too). The
    released code has one set of gates for all layers; here each layer has its own.

    Args:
        spec: the layer that it serves.
        num_tokens: the longest sequence, that of ``spec`` where None.
        start: logit with which gates are open at first; 0 as published, where half of them are closed.

    Raises:
        ValueError: if ``start`` is no finite number, nothing says how many tokens there are at most, or there would be
            more than 2³² logits.
    """

    function = staticmethod(dam_attention)
    one_query_per_key = True
    surrogate_gradient = True
    counts_distances = True
    stochastic = True
    own_logits: ClassVar = "its gates hide keys"
    neutral: ClassVar = {"start": 30.0}

    def __init__(self, spec: AttentionSpec, num_tokens: int | None = None, start: float = 0.0) -> None:
        spec, longest = spec_of_length(spec, num_tokens, "dam learns a gate for each distance")
        super().__init__(spec)
        start = check_number("start", start)
        self.logits = nn.Parameter(1e-3 * torch.randn(check_table((spec.num_heads, longest, 2), longest)))
        with torch.no_grad():
            self.logits[..., 0] += start
        self.drawn = nn.Identity()  # takes the gates of each forward pass, for hooks to see

    def gates(self) -> Tensor:
        """m, ``[H, D]``, 0 or 1; in training each call draws anew, and :attr:`drawn` takes what a forward pass uses."""
        if self.training:
            logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))  # float16 draws zeros
            return F.gumbel_softmax(logits, hard=True)[..., 0].to(self.logits.dtype)
        ahead = self.logits[..., 0] - self.logits[..., 1]
        return torch.where(ahead.isnan(), ahead, (ahead >= 0).to(ahead.dtype))

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        check_length("dam", k.shape[-2], self.logits.shape[1])
        return (self.drawn(self.gates()),)
