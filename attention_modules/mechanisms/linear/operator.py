"""The one operator of linear-time mechanisms: a state that fades, and to which each token adds, in chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import recomputed, without_autocast
from attention_modules.masks import require
from attention_modules.mechanisms.linear import fla
from attention_modules.mechanisms.shared.chunks import refuse_free_length

CHUNK = 64  # tokens whose pairs are compared: half as many are as fast, twice as many slower
GROUP = 16 * CHUNK  # tokens whose chunks are held at once; several groups are computed again in the backward pass
FADED = -1024.0  # the logarithm of a decay that leaves nothing, in float64 either


def linear_operator(
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
    """S_t = e^{a_t} ⊙ S_{t-1} + k_t u_tᵀ and o_t = scale · S_tᵀ q_t, in time and memory linear in N.

    Without ``beta`` u_t = v_t; with it, by the delta rule, u_t = β_t (v_t - (e^{a_t} ⊙ S_{t-1})ᵀ k_t). All is computed
    in float32 (float64 for float64), also under autocast, and no exponent is above 0.

    Args:
        q, k: ``[B, H, N, d]``.
        v: ``[B, H, N, d']``.
        log_decay: a, the natural logarithm of what is kept, 0 or less: one per head ``[H]``, per token ``[B, H, N]`` or
            per channel ``[B, H, N, d]``; None keeps all.
        beta: ``[B, H, N]``.
        initial_state: S before the first token, ``[B, H, d, d']``; zeros where None.
        scale: factor on the output, 1/sqrt(d) where None.
        tokens: which are there, boolean ``[B|1, H|1, N]``: another neither adds to the state nor lets it fade.
        starts: before which the state is emptied, boolean ``[B|1, N]`` (packed sequences).

    Returns:
        o ``[B, H, N, d']`` in the dtype of v, and the last state ``[B, H, d, d']`` in at least float32.

    Raises:
        ValueError: if a shape does not fit, or a decay is above 1; in compiled code and on a GPU the latter is a
            RuntimeError, as it runs.

    Example:
        >>> import torch
        >>> from attention_modules.mechanisms.linear.operator import linear_operator
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
        >>> out, state = linear_operator(q, k, v, torch.tensor([-0.1, -0.2]))
        >>> more, state = linear_operator(q, k, v, torch.tensor([-0.1, -0.2]), initial_state=state)
        >>> out.shape, state.shape
        (torch.Size([1, 2, 100, 8]), torch.Size([1, 2, 8, 8]))
    """
    _check(q, k, v, log_decay, beta, initial_state, tokens, starts)
    if log_decay is not None:
        require(~(log_decay > 0).any(), "log_decay must be 0 or less: a state that grows with each token has no bound")
    heads, number, width = q.shape[1:]
    scale = width**-0.5 if scale is None else scale
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    with without_autocast(q.device):
        if initial_state is None:
            state = torch.zeros(q.shape[0], heads, width, v.shape[-1], dtype=wide, device=q.device)
        else:
            state = initial_state.to(wide)
        if number == 0:
            return (q.to(wide) @ state).to(v.dtype), state
        if log_decay is not None and log_decay.dim() == 1:
            log_decay = log_decay[None, :, None].expand(1, heads, number)
        if fla.covers(q, v, starts):
            return fla.by_kernels(*_seen(q, k, v, log_decay, beta, tokens), state, scale)
        if starts is not None:
            starts = starts.unsqueeze(1)  # [B, 1, N]
        given = [None if x is None else x.split(GROUP, 2) for x in (q, k, v, log_decay, beta, tokens, starts)]
        by_channel = log_decay is not None and log_decay.dim() == 4
        outs = []
        for index in range(-(-number // GROUP)):
            part: list[Any] = [None if x is None else x[index] for x in given]
            part += [state, scale, number > GROUP and not by_channel]
            out, state = recomputed(_group, *part) if number > GROUP and by_channel else _group(*part)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    beta: Tensor | None,
    tokens: Tensor | None,
    starts: Tensor | None,
    state: Tensor,
    scale: float,
    again: bool,
) -> tuple[Tensor, Tensor]:
    """The operator on some chunks, whose pairs are all held, or made again in the backward pass."""
    batch, heads, number, width = q.shape
    wide, values, out_type = state.dtype, v.shape[-1], v.dtype
    a = None if a is None else a.to(wide).clamp(min=FADED)
    if starts is not None:
        a = torch.zeros(1, 1, number, dtype=wide, device=q.device) if a is None else a
    q, k, v, a, beta = _seen(q, k, v, a, beta, tokens)
    if starts is not None and a is not None:
        a = a.masked_fill(starts if a.dim() == 3 else starts.unsqueeze(-1), FADED)
    if a is not None and a.dim() == 3:
        a = a.unsqueeze(-1)
    number = int(number) if torch.jit.is_tracing() else number  # which gives tensors for sizes
    size = min(CHUNK, 1 << (number - 1).bit_length())
    count = -(-number // size)

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.to(wide), (0, 0, 0, count * size - number)) if number % size else x.to(wide)
        return x.unflatten(2, (count, size))

    q, k, v = chunks(q), chunks(k), chunks(v)
    c = None if a is None else chunks(a).cumsum(-2, dtype=_of_sums(q))
    gain = None if beta is None else chunks(beta.unsqueeze(-1))
    made = q, k, gain, c
    pairs, *within = recomputed(_pairs, *made) if again else _pairs(*made)
    if c is None:
        past, last, replaced, tail = q, k, gain, None
    else:
        end = c[..., -1:, :]
        faded, rest, tail = (x.to(wide).exp() for x in (c, end - c, end.mT))
        past, last, replaced = q * faded, k * rest, None if gain is None else gain * faded
    if gain is None or replaced is None:
        added, states = last.mT @ v, []
        for new, keep in zip(added.unbind(2), (None,) * count if tail is None else tail.unbind(2), strict=True):
            states.append(state)
            state = state + new if keep is None else torch.addcmul(new, keep, state)
        here, past, before = (x.flatten(0, 2) for x in (pairs @ v, past, torch.stack(states, 2)))
        out = torch.baddbmm(here, past, before, beta=scale, alpha=scale).unflatten(0, (batch, heads, count))
    else:
        solved = torch.linalg.solve_triangular(
            within[0], torch.cat([gain * v, replaced * k], -1), upper=False, unitriangular=True
        )
        parts = [x.flatten(0, 1).unbind(1) for x in (*solved.split([values, width], -1), last.mT, past, pairs)]
        keeps = (None,) * count if tail is None else tail.expand(batch, heads, -1, -1, -1).flatten(0, 1).unbind(1)
        flat, outs = state.flatten(0, 1), []
        for new, read, turned, asked, pair, keep in zip(*parts, keeps, strict=True):
            u = torch.baddbmm(new, read, flat, alpha=-1)
            outs.append(torch.baddbmm(asked @ flat, pair, u, beta=scale, alpha=scale))
            flat = torch.baddbmm(flat if keep is None else flat * keep, turned, u)
        state = flat.unflatten(0, (batch, heads))
        out = torch.stack(outs, 1).unflatten(0, (batch, heads))
    return out.flatten(2, 3)[:, :, :number].to(out_type), state


def _seen(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, beta: Tensor | None, tokens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Tokens that are not there add nothing to the state, and let nothing of it fade."""
    if tokens is None:
        return q, k, v, a, beta
    seen = tokens.unsqueeze(-1)
    k, v = k.where(seen, 0.0), v.where(seen, 0.0)
    beta = None if beta is None else beta.where(tokens, 0.0)
    return q, k, v, None if a is None else a.where(tokens if a.dim() == 3 else seen, 0.0), beta


def _of_sums(like: Tensor) -> torch.dtype:
    """Of running sums whose differences are taken: with float32, one decay near 0 would spoil all that follow."""
    return like.dtype if like.device.type == "mps" else torch.float64


def _differences(c: Tensor, dtype: torch.dtype) -> Tensor:
    """c_i - c_j ``[..., C, C]``, of what is large and what is small in c, so that none is rounded: c may be float64."""
    if c.dtype == dtype:
        return c - c.mT
    large = c.detach().to(dtype)
    small = (c - large).to(dtype)
    return (large - large.mT) + (small - small.mT)


def _pairs(q: Tensor, k: Tensor, gain: Tensor | None, c: Tensor | None) -> tuple[Tensor, ...]:
    """Σ_d q_id k_jd e^{c_id - c_jd} where j <= i, else 0; and likewise of ``gain * k``.

    Args:
        q, k: ``[..., C, d]``.
        gain: ``[..., C, 1]``.
        c: running sums of the decays' logarithms ``[..., C, 1|d]``.
    """
    size, wide = k.shape[-2], k.dtype
    if c is None or c.shape[-1] == 1:
        past = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
        fade = past.to(wide) if c is None else _differences(c, wide).masked_fill(~past, float("-inf")).exp()
        pairs = (q @ k.mT) * fade
        return (pairs,) if gain is None else (pairs, (k @ k.mT) * (fade * gain))
    rows = q.unsqueeze(-2) if gain is None else torch.stack([q, gain * k], -2)  # [..., C, R, d]
    found = (rows * k.unsqueeze(-2)).sum(-1)[..., None, :, None]  # [..., C, 1, R, 1]: blocks of one token
    half = 1
    while half < size:  # a block is two half ones, and the second's rows with the first's keys, both from its last c
        _, late = rows.unflatten(-3, (-1, 2, half)).unbind(-4)  # [..., blocks, half, R, d]
        early, _ = k.unflatten(-2, (-1, 2, half)).unbind(-3)
        before, after = c.unflatten(-2, (-1, 2, half)).unbind(-3)
        middle = before[..., -1:, :]
        late = late * (after - middle).to(wide).exp().unsqueeze(-2)
        early = early * (middle - before).to(wide).exp()
        if half == 1:  # products of so few rows are slow as matrices
            cross = (late * early.unsqueeze(-2)).sum(-1, keepdim=True)
        else:
            cross = (late.flatten(-3, -2) @ early.mT).unflatten(-2, (half, -1))
        first, second = found.unflatten(-4, (-1, 2)).unbind(-4)  # [..., blocks, half, R, half]
        found = torch.cat([F.pad(first, (0, half)), torch.cat([cross, second], -1)], -3)
        half *= 2
    return found.squeeze(-4).unbind(-2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    tokens: Tensor | None,
    starts: Tensor | None,
) -> None:
    batch, heads, number, width = q.shape
    refuse_free_length(number)
    every = (batch, heads, number)
    fits: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "k": (k, [(*every, width)]),
        "v": (v, [(*every, v.shape[-1])]),
        "log_decay": (log_decay, [(heads,), every, (*every, width)]),
        "beta": (beta, [every]),
        "initial_state": (initial_state, [(batch, heads, width, v.shape[-1])]),
        "tokens": (tokens, [(b, h, number) for b in (batch, 1) for h in (heads, 1)]),
        "starts": (starts, [(batch, number), (1, number)]),
    }
    for name, (tensor, shapes) in fits.items():
        # Tuples of another length are compared element by element, which would bind free sizes of a program.
        if tensor is not None and tuple(tensor.shape) not in [each for each in shapes if len(each) == tensor.dim()]:
            shown = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ValueError(f"{name} must be of shape {shown}, got {tuple(tensor.shape)}")
