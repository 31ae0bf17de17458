"""The passes of Principal Attention Pursuit: in plain autograd, and with attention recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_modules.kernels import (
    attend,
    check_dropout,
    flash,
    flash_applies,
    flash_backward,
    flash_mask,
    once_differentiable,
)


def pursue(
    k: Tensor,
    v: Tensor,
    limit: Tensor | None,
    iterations: int,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """L after ``iterations`` passes, by the fused form where gradients are wanted and it applies.

    Args:
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        limit: soft threshold, broadcastable to ``[B, H, N, 1]``, or None for no threshold; may be of a wider dtype.
        iterations: number of softmax passes.
        attn_mask: boolean or additive, ``[B|1, H|1, N|1, N|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout of the last pass.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``.
    """
    check_dropout(dropout_p)
    wanted = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad) and dropout_p == 0.0
    if wanted and flash_applies(k, v, attn_mask, is_causal, scale):
        return FusedPursuit.apply(k, v, limit, flash_mask(attn_mask, k.dtype), iterations, is_causal, scale)
    return plain_pursuit(k, v, limit, iterations, attn_mask, is_causal, dropout_p, scale)


def clip(x: Tensor, limit: Tensor | None) -> Tensor:
    """x clamped to [-limit, limit], in the dtype of x; x itself where there is no limit."""
    if limit is None:
        return x
    limit = limit.to(x.dtype)
    return torch.clamp(x, -limit, limit)


def pass_inputs(
    k: Tensor, limit: Tensor | None, iterations: int, low_ranks: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What each pass clips, and its query.

    With the dual variable Y divided by mu, mu is left in the threshold only; with E = Y/mu + L a pass is
    c = clip(k + E - 2L), q = c - 2E + 3L, E <- L + c, L <- attention(q, q, v), from E = c = q = clip(k).

    Args:
        k: keys ``[B, H, N, d]``.
        limit: soft threshold, broadcastable to ``[B, H, N, 1]``, or None.
        iterations: number of softmax passes.
        low_ranks: L of each pass, ``[B, H, N, d]``; may grow as the iterator goes.
    """
    estimate = query = clip(k, limit)
    yield k, query
    for done in range(iterations - 1):
        raw, query, estimate = next_input(k, limit, estimate, low_ranks[done])
        yield raw, query


def next_input(k: Tensor, limit: Tensor | None, estimate: Tensor, low_rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the next pass clips, its query, and the next E; see :func:`pass_inputs`."""
    raw = torch.add(k, estimate).sub_(low_rank, alpha=2)
    clipped = clip(raw, limit)
    query = torch.sub(clipped, estimate, alpha=2).add_(low_rank, alpha=3)
    return raw, query, clipped.add_(low_rank)  # in place: fresh memory costs more than the sum


def mix_passes(mix: Callable[[Tensor, bool], Tensor], k: Tensor, limit: Tensor | None, iterations: int) -> list[Tensor]:
    """L of each pass, which ``mix`` gives of its query and of whether it is the last.

    Not by the iterator above: torch.compile of torch 2.6 runs an iterator to its end before the loop that it feeds.
    """
    estimate = query = clip(k, limit)
    low_ranks = [mix(query, iterations == 1)]
    for done in range(1, iterations):
        _, query, estimate = next_input(k, limit, estimate, low_ranks[-1])
        low_ranks.append(mix(query, done == iterations - 1))
    return low_ranks


def plain_pursuit(
    k: Tensor,
    v: Tensor,
    limit: Tensor | None,
    iterations: int,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """:func:`pursue` in plain autograd, differentiable as often as attention is."""

    def mix(query: Tensor, is_last: bool) -> Tensor:
        return attend(query, query, v, attn_mask, is_causal, dropout_p if is_last else 0.0, scale)

    return mix_passes(mix, k, limit, iterations)[-1]


class FusedPursuit(torch.autograd.Function):
    """The pursuit with flash attention; keeps L and the log-sum-exp of each pass and recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        limit: Tensor | None,
        attn_mask: Tensor | None,
        iterations: int,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        logsumexps: list[Tensor] = []

        def mix(query: Tensor, is_last: bool) -> Tensor:
            low_rank, logsumexp = flash(query, v, attn_mask, is_causal, scale)
            logsumexps.append(logsumexp)
            return low_rank

        low_ranks = mix_passes(mix, k, limit, iterations)
        ctx.save_for_backward(k, v, limit, attn_mask, *low_ranks, *logsumexps)
        ctx.iterations, ctx.is_causal, ctx.scale = iterations, is_causal, scale
        return low_ranks[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        k, v, limit, attn_mask, *kept = ctx.saved_tensors
        with torch.no_grad():
            grads = pursuit_gradients(
                grad,
                k,
                v,
                limit,
                attn_mask,
                kept[: ctx.iterations],
                kept[ctx.iterations :],
                ctx.is_causal,
                ctx.scale,
            )
        if torch.is_grad_enabled():
            found = once_differentiable("RPC attention's fused form has", *grads, of=(grad, k, v))
            return (*found, None, None, None, None)
        return (*grads, None, None, None, None)


def pursuit_gradients(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    limit: Tensor | None,
    attn_mask: Tensor | None,
    low_ranks: Sequence[Tensor],
    logsumexps: Sequence[Tensor],
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the fused pursuit for k, v and the threshold, from the gradient ``[B, H, N, d]`` of its output."""
    inputs = list(pass_inputs(k, limit, len(low_ranks), low_ranks))
    grad_low, grad_estimate = grad, torch.zeros_like(k)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    grad_limit = None if limit is None else torch.zeros_like(limit)
    for done in reversed(range(len(low_ranks))):
        raw, query = inputs.pop()
        grad_query, grad_value = flash_backward(
            grad_low, query, v, low_ranks[done], logsumexps[done], attn_mask, is_causal, scale
        )
        grad_v += grad_value
        grad_raw = grad_estimate.add_(grad_query)  # the gradient of c, until what was clipped is taken out
        grad_low = 2 * grad_query
        if limit is not None and grad_limit is not None:
            clipped = clip(raw, limit)
            side = torch.sub(raw, clipped, out=clipped).sign_()  # -1 or 1 where clipped, else 0
            slope = torch.linalg.vecdot(grad_raw, side).to(limit.dtype)  # summed over rows in the limit's dtype
            grad_limit += slope.unsqueeze(-1).sum_to_size(limit.shape)
            stopped = side.square_().mul_(grad_raw)
            grad_raw.sub_(stopped)
            grad_low.add_(stopped)
        grad_k += grad_raw
        grad_low.sub_(grad_raw)
        grad_estimate = grad_raw.sub_(grad_query, alpha=2)
    return grad_k, grad_v, grad_limit
