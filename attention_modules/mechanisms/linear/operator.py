"""The one operator of linear-time mechanisms: a state that fades, and to which each token adds, in chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import recomputed, without_autocast

CHUNK = 64  # tokens whose pairs are compared: half as many are as fast, twice as many slower
GROUP = 16 * CHUNK  # tokens whose chunks are held at once; several groups are computed again in the backward pass
FADED = {torch.float32: -64.0, torch.float64: -1024.0}  # logarithm of a decay that leaves nothing to be seen


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
        ValueError: if a shape does not fit.

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
        if starts is not None:
            starts = starts.unsqueeze(1)  # [B, 1, N]
        given = [None if x is None else x.split(GROUP, 2) for x in (q, k, v, log_decay, beta, tokens, starts)]
        outs = []
        for index in range(-(-number // GROUP)):
            part: list[Any] = [*(None if x is None else x[index] for x in given), state, scale]
            out, state = recomputed(_group, *part) if number > GROUP else _group(*part)
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
) -> tuple[Tensor, Tensor]:
    """The operator on some chunks, whose pairs are all held."""
    batch, heads, number, width = q.shape
    wide, values, out_type = state.dtype, v.shape[-1], v.dtype
    a = None if a is None else a.to(wide).clamp(min=FADED[wide])
    if starts is not None:
        a = torch.zeros(1, 1, number, dtype=wide, device=q.device) if a is None else a
    if tokens is not None:
        zero = torch.zeros((), dtype=wide, device=q.device)
        seen = tokens.unsqueeze(-1)
        k, v = torch.where(seen, k.to(wide), zero), torch.where(seen, v.to(wide), zero)
        beta = None if beta is None else torch.where(tokens, beta.to(wide), zero)
        a = None if a is None else torch.where(tokens if a.dim() == 3 else seen, a, zero)
    if starts is not None and a is not None:
        a = a.masked_fill(starts if a.dim() == 3 else starts.unsqueeze(-1), FADED[wide])
    if a is not None and a.dim() == 3:
        a = a.unsqueeze(-1)
    size = min(CHUNK, 1 << (number - 1).bit_length())
    count = -(-number // size)

    def chunks(x: Tensor) -> Tensor:
        x = F.pad(x.to(wide), (0, 0, 0, count * size - number)) if number % size else x.to(wide)
        return x.unflatten(2, (count, size))

    q, k, v = chunks(q) * scale, chunks(k), chunks(v)
    c = None if a is None else chunks(a).cumsum(-2)
    rows = q.unsqueeze(-3) if beta is None else torch.stack([q, k], -3)  # [B, H, n, 1|2, C, d]
    pairs = _pairs(rows, k, c)
    past, last, tail = (q, k, None)
    if c is not None:
        end = c[..., -1:, :]
        faded, rest, tail = c.exp(), (end - c).exp(), end.mT.exp()
        past, last = q * faded, k * rest
    if beta is None:
        u, added = v, last.mT @ v
        states = []
        for new, keep in zip(added.unbind(2), (None,) * count if tail is None else tail.unbind(2), strict=True):
            states.append(state)
            state = state + new if keep is None else torch.addcmul(new, keep, state)
    else:
        gain = chunks(beta.unsqueeze(-1))
        within = gain * pairs[:, :, :, 1].tril(-1)
        before = gain * (k if c is None else k * faded)
        solved = torch.linalg.solve_triangular(
            within, torch.cat([gain * v, before], -1), upper=False, unitriangular=True
        )
        new, read = (x.flatten(0, 1) for x in solved.split([values, width], -1))
        turned = last.flatten(0, 1).mT
        flat, states, us = state.flatten(0, 1), [], []
        keeps = (None,) * count if tail is None else tail.expand(batch, heads, -1, -1, -1).flatten(0, 1).unbind(1)
        for new_i, read_i, turned_i, keep in zip(new.unbind(1), read.unbind(1), turned.unbind(1), keeps, strict=True):
            states.append(flat.unflatten(0, (batch, heads)))
            us.append(torch.baddbmm(new_i, read_i, flat, alpha=-1))
            flat = torch.baddbmm(flat if keep is None else flat * keep, turned_i, us[-1])
        state, u = flat.unflatten(0, (batch, heads)), torch.stack(us, 1).unflatten(0, (batch, heads))
    out = past @ torch.stack(states, 2) + pairs[:, :, :, 0] @ u
    return out.flatten(2, 3)[:, :, :number].to(out_type), state


def _pairs(rows: Tensor, k: Tensor, c: Tensor | None) -> Tensor:
    """Σ_d rows_id k_jd e^{c_id - c_jd} where j <= i, else 0, ``[..., R, C, C]``.

    Args:
        rows: ``[..., R, C, d]``.
        k: ``[..., C, d]``.
        c: running sums of the decays' logarithms ``[..., C, 1|d]``.
    """
    size = k.shape[-2]
    if c is None:
        return (rows @ k.unsqueeze(-3).mT).tril()
    if c.shape[-1] == 1:
        hidden = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        fade = (c - c.mT).masked_fill(hidden, float("-inf")).exp()
        return (rows @ k.unsqueeze(-3).mT) * fade.unsqueeze(-3)
    k, c = k.unsqueeze(-3), c.unsqueeze(-3)
    found = (rows * k).sum(-1)[..., None, None]  # [..., C, 1, 1]: blocks of one token
    half = 1
    while half < size:  # a block is two half ones, and the second's rows with the first's keys, both from its last c
        _, late = rows.unflatten(-2, (-1, 2, half)).unbind(-3)
        early, _ = k.unflatten(-2, (-1, 2, half)).unbind(-3)
        before, after = c.unflatten(-2, (-1, 2, half)).unbind(-3)
        middle = before[..., -1:, :]
        cross = (late * (after - middle).exp()) @ (early * (middle - before).exp()).mT
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        found = torch.cat([F.pad(first, (0, half)), torch.cat([cross, second], -1)], -2)
        half *= 2
    return found.squeeze(-3)


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
        if tensor is not None and tuple(tensor.shape) not in shapes:
            shown = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ValueError(f"{name} must be of shape {shown}, got {tuple(tensor.shape)}")
