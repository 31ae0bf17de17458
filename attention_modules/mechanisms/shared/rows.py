"""Maps made a few rows at a time, and made again in the backward pass, whose derivatives have a short form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attention_modules.kernels import transforms_active, without_autocast
from attention_modules.masks import visible

CHUNK = 64  # rows of the map that are held at once
Plain = Callable[[Tensor, Tensor, Tensor], Tensor]


class RowMap(Protocol):
    """How rows of logits become weights. All logits are at least float32, -inf where a key is hidden, and may be
    written over."""

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights ``[B, H, n, M]``, and what :meth:`again` needs of each row ``[B, H, n, 1]``, if anything."""

    def again(self, logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights once more, and what :meth:`slope` needs."""

    def slope(self, above: Tensor, state: Tensor) -> Tensor:
        """The gradient for the logits, of that for the weights, which may be written over."""


class Logits(NamedTuple):
    """What stands between q kᵀ and the weights.

    Args:
        shift: added to each row, ``[B|1, H|1, N|1, 1]``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on q kᵀ.
    """

    shift: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    scale: float


def rows_apply(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
    """Whether :class:`MappedRows` gives what plain autograd does: not with dropout, a mask that learns, transforms."""
    if dropout_p > 0.0 or torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active():
        return False
    if any(type(x) not in (Tensor, nn.Parameter) for x in (q, k, v)):
        return False
    return attn_mask is None or not attn_mask.requires_grad


class MappedRows(torch.autograd.Function):
    """row_map(q kᵀ · scale + shift + mask) v of queries ``[B, H, N, d]``; ``plain`` gives it in plain autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, logits: Logits, row_map: RowMap, plain: Plain) -> Tensor:
        inputs = (q, k, v)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, of_rows = q.new_empty(*q.shape[:-1], v.shape[-1]), []
        with without_autocast(q.device):
            for rows, keys, part in _parts(q, k, logits):
                weights, kept = row_map.weights(part)
                out[..., rows, :] = weights.to(v.dtype) @ v[..., keys, :]
                of_rows += [] if kept is None else [kept]
        ctx.save_for_backward(*inputs, logits.shift, logits.attn_mask, torch.cat(of_rows, -2) if of_rows else None)
        ctx.is_causal, ctx.scale, ctx.row_map, ctx.plain = logits.is_causal, logits.scale, row_map, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, shift, attn_mask, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this gradient is wanted
            return (*_differentiable(ctx.plain, (q, k, v), ctx.needs_input_grad, grad), None, None, None)
        q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
        logits = Logits(shift, attn_mask, ctx.is_causal, ctx.scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        with without_autocast(q.device):
            for rows, keys, part in _parts(q, k, logits):
                above = grad[..., rows, :]
                weights, state = ctx.row_map.again(part, None if kept is None else kept[..., rows, :])
                grad_v[..., keys, :] += weights.to(v.dtype).transpose(-2, -1) @ above
                slope = ctx.row_map.slope((above @ v[..., keys, :].transpose(-2, -1)).to(wide), state).to(q.dtype)
                grad_q[..., rows, :] = slope @ k[..., keys, :]
                grad_k[..., keys, :] += slope.transpose(-2, -1) @ q[..., rows, :]
        found = grad_q.mul_(ctx.scale), grad_k.mul_(ctx.scale).to(k.dtype), grad_v.to(v.dtype)
        return (*found, None, None, None)


def _differentiable(
    plain: Plain, inputs: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """The gradients of those inputs that want one, with a graph of their own."""
    wanted = wanted[: len(inputs)]
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(plain(*inputs), chosen, grad, create_graph=True))
    return (next(found) if want else None for want in wanted)


def _parts(q: Tensor, k: Tensor, logits: Logits) -> Iterator[tuple[slice, slice, Tensor]]:
    """A few rows, the keys that they may see, and the logits between them, at least float32."""
    total = q.shape[-2]
    for first in range(0, total, CHUNK):
        rows = slice(first, min(first + CHUNK, total))
        keys = slice(0, rows.stop if logits.is_causal else k.shape[-2])
        product = q[..., rows, :] @ k[..., keys, :].transpose(-2, -1)
        part = product.to(torch.promote_types(q.dtype, torch.float32)).mul_(logits.scale)
        if logits.shift is not None:
            part += _of_rows(logits.shift, rows)
        if logits.attn_mask is not None:
            mask = _of_rows(logits.attn_mask, rows)
            if mask.dtype != torch.bool:
                part += mask
            part.masked_fill_(~visible(mask), float("-inf"))
        if logits.is_causal:
            size = rows.stop - first
            future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            part[..., first:].masked_fill_(future, float("-inf"))
        yield rows, keys, part


def _of_rows(x: Tensor, rows: slice) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., rows, :]
