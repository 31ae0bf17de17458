"""Random features of the softmax kernel (Performer, FAVOR+: Choromanski et al., ICLR 2021)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.base import State
from attention_modules.kernels import without_autocast
from attention_modules.masks import tokens_of
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.linear.stateful import StatefulMechanism, check_state, mix_by_features
from attention_modules.mechanisms.shared.options import check_integer

LEAST = 1e-4  # added to the query's features, as in the released code
NOTHING = 1e-30  # added to sums, which are at least LEAST where a row sees a key
TOP = "top"  # of a state: the largest exponent of the keys so far, [B, H]
LOWEST = -1e30  # where there was no key


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), φ(x) = exp(P x̂ - ‖x̂‖²/2), whose mean over P is softmax's exp(z_ij).

    x̂ is x d^(-1/4). The largest exponent of each query is taken off its features, to which 1e-4 is added. From the
    keys' exponents the largest so far is taken, by which the sums fade as it grows: that is exact. (The released code
    takes the largest of all keys and of the batch, adds 1e-4 to these features too, and so shows the future.)

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        projection: P, ``[m, d]``.
        attn_mask: of tokens that are there, ``[B, 1, 1, N]``, alone or with the causal triangle ``[B, 1, N, N]``.
        is_causal: whether the future is hidden.
        dropout_p: probability that a token's value is left out of all rows.
        scale: factor on the logits, 1/sqrt(d) where None.
        state: of earlier tokens, empty before the first; it is filled with what stands for all tokens so far.
        starts: before which tokens the state is emptied, boolean ``[B, N]``.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit, or a state is used where the future is seen.

    Example:
        >>> import torch
        >>> from attnswap.functional import performer_attention
        >>> q, k, v = torch.randn(3, 1, 3, 50, 8)
        >>> performer_attention(q, k, v, torch.randn(32, 8), is_causal=True).shape
        torch.Size([1, 3, 50, 8])
    """
    if projection.dim() != 2 or projection.shape[-1] != q.shape[-1]:
        raise ValueError(f"projection must be [m, d] = (m, {q.shape[-1]}), got {tuple(projection.shape)}")
    tokens, causal = tokens_of("performer", attn_mask, is_causal, q, k)
    factor = q.shape[-1] ** -0.25
    with without_autocast(q.device):
        wide = torch.promote_types(q.dtype, torch.float32)
        draws = projection.to(wide)
        of_query = (q.to(wide) * (factor if scale is None else scale / factor)) @ draws.mT
        of_query = (of_query - of_query.amax(-1, keepdim=True)).exp() + LEAST
        rooted = k.to(wide) * factor
        of_key = rooted @ draws.mT - rooted.square().sum(-1, keepdim=True) / 2
        if tokens is not None:
            of_key = of_key.masked_fill(~tokens[..., None], LOWEST)
        top, fade = of_key.detach().amax(-1), None  # [B, H, N]; without a gradient, as it cancels
        if causal or q.shape[-2] == 1:
            if state:
                check_state("performer", state, {TOP: tuple(top.shape[:2])})
            before = state[TOP].to(wide) if state else top.new_full(top.shape[:2], LOWEST)
            tops = running_max(torch.cat([before[..., None], top], -1), starts)
            top, fade = tops[..., 1:], (tops[..., :-1] - tops[..., 1:]).clamp(max=0.0)  # a start may be lower
        else:
            tops = top = F.pad(top, (0, 1), value=LOWEST).amax(-1, keepdim=True)  # there may be no key
        of_key = (of_key - top[..., None]).exp()
    given: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p}
    out = mix_by_features("performer", of_query, of_key, v, NOTHING, fade, state=state, starts=starts, **given)
    if state is not None:
        state[TOP] = tops[..., -1].clone()
    return out


def running_max(x: Tensor, starts: Tensor | None) -> Tensor:
    """The largest number so far, of ``[B, H, N + 1]``, since the last start ``[B, N]`` of those after the first."""
    if starts is None:
        return x.cummax(-1).values
    begun = F.pad(starts, (1, 0))[:, None]
    step = 1
    while step < x.shape[-1]:  # of the last `step` numbers; then of twice as many
        other = torch.where(begun[..., step:], LOWEST, x[..., :-step])
        x = torch.cat([x[..., :step], torch.maximum(x[..., step:], other)], -1)
        begun = torch.cat([begun[..., :step], begun[..., step:] | begun[..., :-step]], -1)
        step *= 2
    return x


def orthogonal_draws(number: int, width: int, seed: int) -> Tensor:
    """Normal vectors that are orthogonal in groups of ``width``, ``[number, width]``; the global state stays."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-number // width)
    normal = torch.randn(2, groups, width, width, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(normal[0]).Q.mT
    return (directions * normal[1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:number]


@register_mechanism("performer")
class PerformerAttention(StatefulMechanism):
    """:func:`performer_attention` as a mechanism: a baseline, far from softmax where logits are large.

    Args:
        spec: the layer that it serves.
        features: m, how many random directions; d ln d where None, as in the released code.
        seed: of the directions, which are a buffer that is saved; each layer has others.

    Raises:
        ValueError: if an option is out of its limits.
    """

    function = staticmethod(performer_attention)
    causality = "any"
    per_head = ()
    projection: Tensor

    def __init__(self, spec: AttentionSpec, features: int | None = None, seed: int = 0) -> None:
        super().__init__(spec)
        width = spec.head_dim
        number = max(1, int(width * math.log(width))) if features is None else features
        check_integer("features", number, at_least=1)
        seed = check_integer("seed", seed, at_least=0, at_most=2**31)
        draws = orthogonal_draws(number, width, 1000 * seed + (spec.layer_index or 0))
        self.register_buffer("projection", draws.float())

    def extra_repr(self) -> str:
        return f"features={len(self.projection)}"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, self.projection
