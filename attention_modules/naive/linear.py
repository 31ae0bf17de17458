"""Mechanisms with a state, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.naive.common import visibility


def naive_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    tokens: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{a_t} ⊙ S_{t-1} + k_t u_tᵀ, o_t = scale · S_tᵀ q_t, u_t = v_t or β_t (v_t - (e^{a_t} ⊙ S_{t-1})ᵀ k_t)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(q.shape[:3])
    outs = []
    for t in range(q.shape[2]):
        if starts is not None:
            state = torch.where(starts[:, None, t, None, None], 0.0, state)
        new = state
        if log_decay is not None:
            new = (log_decay[:, :, t, :, None] if log_decay.dim() == 4 else log_decay[:, :, t, None, None]).exp() * new
        u = v[:, :, t]
        if beta is not None:
            u = beta[:, :, t, None] * (u - (new * k[:, :, t, :, None]).sum(-2))
        new = new + k[:, :, t, :, None] * u[:, :, None]
        state = new if tokens is None else torch.where(tokens[..., t, None, None], new, state)
        outs.append(scale * (state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(outs, 2), state


def _tokens(attn_mask: Tensor | None) -> Tensor | None:
    """The tokens that some row sees, ``[B|1, H|1, N]``."""
    if attn_mask is None:
        return None
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -9984
    return seen.view((1,) * (4 - seen.dim()) + tuple(seen.shape)).any(-2)


def _hides_the_future(attn_mask: Tensor | None, is_causal: bool) -> bool:
    return is_causal or (attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1)


def naive_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-6,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """φ(q_i)·φ(k_j) over its sum and ε, φ = elu + 1; token by token where the future is hidden."""
    q, k = F.elu(q * (1.0 if scale is None else scale * q.shape[-1] ** 0.5)) + 1, F.elu(k) + 1
    if _hides_the_future(attn_mask, is_causal):
        ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        mixed, _ = naive_recurrence(q, k, ones, scale=1.0, tokens=_tokens(attn_mask))
        return mixed[..., :-1] / (mixed[..., -1:] + eps)
    weights = (q @ k.mT) * visibility(k.shape[-2], attn_mask)
    return weights @ v / (weights.sum(-1, keepdim=True) + eps)


def naive_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """e^{a |i - j|} q_i·k_j · scale; a distance counts tokens that are there."""
    tokens = _tokens(attn_mask)
    if _hides_the_future(attn_mask, is_causal):
        return naive_recurrence(q, k, v, log_decay, scale=scale, tokens=tokens)[0]
    there = torch.ones(k.shape[:3], dtype=k.dtype) if tokens is None else tokens.to(k.dtype).expand(k.shape[:3])
    place = there.cumsum(-1)
    # From a token that is not there, the nearest before it is as near as the nearest behind it.
    ahead = place[..., :, None] - place[..., None, :]
    behind = (place - there)[..., None, :] - (place - there)[..., :, None]
    distance = torch.where(torch.ones(ahead.shape[-2:], dtype=torch.bool).tril(), ahead, behind)
    weights = (q @ k.mT) * (log_decay[:, None, None] * distance).exp() * there[..., None, :]
    return weights @ v * (q.shape[-1] ** -0.5 if scale is None else scale)


def naive_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """A state of which each channel fades at its own pace."""
    return naive_recurrence(q, k, v, log_decay, scale=scale, tokens=_tokens(attn_mask))[0]


def naive_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """A state of which each token replaces a part."""
    return naive_recurrence(q, k, v, None, beta, scale=scale, tokens=_tokens(attn_mask))[0]


def naive_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The same, and the state fades before."""
    return naive_recurrence(q, k, v, log_decay, beta, scale=scale, tokens=_tokens(attn_mask))[0]


naive_kda = naive_gated_delta  # its decay has channels
