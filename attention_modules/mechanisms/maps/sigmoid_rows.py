"""Sigmoid attention a few rows at a time, whose weights are made again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention_modules.kernels import transforms_active, without_autocast
from attention_modules.masks import visible

CHUNK = 64  # rows of the map that are held at once
Plain = Callable[[Tensor, Tensor, Tensor], Tensor]


class Logits(NamedTuple):
    """What stands between q kᵀ and the sigmoid.

    Args:
        shift: added to each row, ``[B|1, H|1, N|1, 1]``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on q kᵀ.
    """

    shift: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float


def rows_apply(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
    """Whether :class:`SigmoidRows` gives what plain autograd does: not with dropout, a mask that learns, transforms."""
    if dropout_p > 0.0 or torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active():
        return False
    if any(type(x) not in (Tensor, nn.Parameter) for x in (q, k, v)):
        return False
    return attn_mask is None or not attn_mask.requires_grad


class SigmoidRows(torch.autograd.Function):
    """σ(q kᵀ · scale + shift + mask) v of queries ``[B, H, N, d]``; ``plain`` gives it in plain autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, logits: Logits, plain: Plain) -> Tensor:
        ctx.save_for_backward(q, k, v, logits.shift, logits.attn_mask)
        ctx.is_causal, ctx.scale, ctx.plain = logits.is_causal, logits.scale, plain
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        with without_autocast(q.device):
            for rows, keys, weights in _parts(q, k, logits):
                out[..., rows, :] = weights.to(v.dtype) @ v[..., keys, :]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, shift, attn_mask = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this gradient is wanted
            return (*_differentiable(ctx.plain, (q, k, v), ctx.needs_input_grad, grad), None, None)
        q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
        logits = Logits(shift, attn_mask, ctx.is_causal, ctx.scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        with without_autocast(q.device):
            for rows, keys, weights in _parts(q, k, logits):
                above = grad[..., rows, :]
                grad_v[..., keys, :] += weights.to(v.dtype).transpose(-2, -1) @ above
                slope = (above @ v[..., keys, :].transpose(-2, -1)).to(wide)
                slope = torch.ops.aten.sigmoid_backward(slope, weights).to(q.dtype)
                grad_q[..., rows, :] = slope @ k[..., keys, :]
                grad_k[..., keys, :] += slope.transpose(-2, -1) @ q[..., rows, :]
        return grad_q.mul_(ctx.scale), grad_k.mul_(ctx.scale).to(k.dtype), grad_v.to(v.dtype), None, None


def _differentiable(
    plain: Plain, inputs: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """The gradients of those inputs that want one, with a graph of their own."""
    wanted = wanted[: len(inputs)]
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(plain(*inputs), chosen, grad, create_graph=True))
    return (next(found) if want else None for want in wanted)


def _parts(q: Tensor, k: Tensor, logits: Logits) -> Iterator[tuple[slice, slice, Tensor]]:
    """A few rows, the keys that they may see, and the weights between them, at least float32."""
    total = q.shape[-2]
    for first in range(0, total, CHUNK):
        rows = slice(first, min(first + CHUNK, total))
        keys = slice(0, rows.stop if logits.is_causal else k.shape[-2])
        product = q[..., rows, :] @ k[..., keys, :].transpose(-2, -1)
        weights = product.to(torch.promote_types(q.dtype, torch.float32)).mul_(logits.scale)
        weights += _of_rows(logits.shift, rows)
        mask = None if logits.attn_mask is None else _of_rows(logits.attn_mask, rows)
        if mask is not None and mask.dtype != torch.bool:
            weights += mask
        weights.sigmoid_()
        if mask is not None:
            weights.masked_fill_(~visible(mask), 0.0)
        if logits.is_causal:
            weights[..., first:].tril_()
        yield rows, keys, weights


def _of_rows(x: Tensor, rows: slice) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., rows, :]
