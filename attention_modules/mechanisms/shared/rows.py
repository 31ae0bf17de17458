"""Maps made a few rows at a time, and made again in the backward pass, whose derivatives have a short form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attention_modules.kernels import autocast, check_dropout, taker, transforms_active, without_autocast
from attention_modules.masks import visible
from attention_modules.mechanisms.shared.chunks import attend_by
from attention_modules.precision import scaled_logits, wide_product

CHUNK = 64  # rows of the map that are held at once
Plain = Callable[..., Tensor]


class RowMap(Protocol):
    """How rows of logits become weights. All logits are at least float32, -inf where a key is hidden, and may be
    written over."""

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights ``[B, H, n, M]``, and what :meth:`again` needs of each row ``[B, H, n, ...]``, if anything."""

    def again(self, logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The weights once more, and what :meth:`slope` needs."""

    def slope(self, above: Tensor, state: Tensor) -> Tensor:
        """The gradient for the logits, of that for the weights, which may be written over."""


class SoftmaxRows:
    """Softmax, whose rows of no visible key are zero."""

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        top = logits.amax(-1, keepdim=True)
        top = top.masked_fill(top.isneginf(), 0.0)  # rows that see nothing
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return weights.div_(total), torch.cat([top, total], -1)  # their logarithm's sum would round large logits

    def again(self, logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        top, total = kept.split(1, -1)  # type: ignore[union-attr]
        weights = logits.sub_(top).exp_().div_(total)
        return weights, weights

    def slope(self, above: Tensor, state: Tensor) -> Tensor:
        above.mul_(state)
        return above.addcmul_(state, above.sum(-1, keepdim=True), value=-1)


class Addend(Protocol):
    """How a learned tensor of a layer adds to logits."""

    def values(self, learned: Tensor, rows: slice, columns: int) -> Tensor:
        """What is added to those of some rows and the first keys, ``[H, n, M]``, differentiable."""

    def collect(self, slope: Tensor, gradient: Tensor, rows: slice) -> None:
        """Add to the learned tensor's gradient, in place, what that of the logits ``[B, H, n, M]`` gives."""


class Logits(NamedTuple):
    """What stands between q kᵀ and the weights.

    Args:
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on q kᵀ.
        shift: added to each row, ``[B|1, H|1, N|1, 1]``.
        addend: what else is added.
    """

    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    shift: Tensor | None = None
    addend: Addend | None = None


def mapped(
    row_map: RowMap,
    plain: Plain,
    inputs: Sequence[Tensor],
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    shift: Callable[[], Tensor] | None = None,
    addend: Addend | None = None,
) -> Tensor:
    """row_map(q kᵀ · scale + what is added + mask) v, by :class:`MappedRows` where that gives what autograd does.

    Args:
        row_map: makes weights of logits.
        plain: the same in plain autograd, of the inputs.
        inputs: queries ``[B, H, N, d]``, keys and values ``[B, H, M, d]``, and what is learned, if anything.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: dropout of the weights.
        scale: factor on the logits, 1/sqrt(d) where None.
        shift: gives what is added to each row.
        addend: adds what is learned.

    Returns:
        ``[B, H, N, d]``.

    Raises:
        ValueError: if ``dropout_p`` is no probability.
    """
    check_dropout(dropout_p)
    if not _applies(attn_mask, dropout_p, inputs) or inputs[1].shape[-2] == 0:
        return plain(*inputs)
    (q, k, v), learned = inputs[:3], inputs[3] if len(inputs) > 3 else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = Logits(attn_mask, is_causal, scale, None if shift is None else shift(), addend)
    return MappedRows.apply(autocast(q), autocast(k), autocast(v), learned, logits, row_map, plain)


def _applies(attn_mask: Tensor | None, dropout_p: float, inputs: Sequence[Tensor]) -> bool:
    """Not with dropout, a mask that learns, transforms, nor where somebody wants to see the map."""
    if dropout_p > 0.0 or torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_active():
        return False
    if taker() is not None:
        return False
    if any(type(x) not in (Tensor, nn.Parameter) for x in inputs):
        return False
    return attn_mask is None or not attn_mask.requires_grad


def softmax_with(
    addend: Addend,
    learned: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """softmax(q kᵀ · scale + what is learned + mask) v; zeros in rows that see nothing. Arguments as :func:`mapped`."""

    def plain(q: Tensor, k: Tensor, v: Tensor, learned: Tensor) -> Tensor:
        def weights(logits: Tensor, seen: Tensor, first: int) -> Tensor:
            rows, columns = logits.shape[-2:]
            logits = logits + addend.values(learned.to(logits.dtype), slice(first, first + rows), columns)
            lowest = torch.finfo(logits.dtype).min / 2  # -inf would be NaN in rows that see nothing
            return torch.where(seen, logits, lowest).softmax(-1)

        return attend_by(weights, q, k, v, attn_mask, is_causal, dropout_p, scale)

    return mapped(SoftmaxRows(), plain, (q, k, v, learned), attn_mask, is_causal, dropout_p, scale, addend=addend)


class MappedRows(torch.autograd.Function):
    """row_map(q kᵀ · scale + what is added) v of queries ``[B, H, N, d]``.

    Args:
        q, k, v: queries, keys and values.
        learned: what ``logits.addend`` adds, if anything.
        logits: the rest.
        row_map: makes weights of logits.
        plain: the same in plain autograd, of q, k, v and what is learned, if anything.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: Tensor | None,
        logits: Logits,
        row_map: RowMap,
        plain: Plain,
    ) -> Tensor:
        inputs = (q, k, v, learned)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, of_rows = q.new_empty(*q.shape[:-1], v.shape[-1]), []
        with without_autocast(q.device):
            for rows, keys, part in _parts(q, k, learned, logits):
                weights, kept = row_map.weights(part)
                out[..., rows, :] = weights.to(v.dtype) @ v[..., keys, :]
                of_rows += [] if kept is None else [kept]
        kept = torch.cat(of_rows, -2) if of_rows else None
        ctx.save_for_backward(*inputs, logits.shift, logits.attn_mask, kept)
        ctx.logits, ctx.row_map, ctx.plain = logits._replace(shift=None, attn_mask=None), row_map, plain
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, learned, shift, attn_mask, kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this gradient is wanted
            found = _differentiable(ctx.plain, (q, k, v, learned), ctx.needs_input_grad, grad)
            return (*found, None, None, None)
        q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
        logits: Logits = ctx.logits._replace(shift=shift, attn_mask=attn_mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        grad_learned = None
        if ctx.needs_input_grad[3]:
            grad_learned = torch.zeros_like(learned, dtype=torch.promote_types(learned.dtype, wide))
        with without_autocast(q.device):
            for rows, keys, part in _parts(q, k, learned, logits):
                above = grad[..., rows, :]
                weights, state = ctx.row_map.again(part, None if kept is None else kept[..., rows, :])
                grad_v[..., keys, :] += weights.to(v.dtype).transpose(-2, -1) @ above
                slope = ctx.row_map.slope(wide_product(above, v[..., keys, :]), state)
                if grad_learned is not None and logits.addend is not None:
                    logits.addend.collect(slope, grad_learned, rows)
                slope = slope.mul_(logits.scale).to(q.dtype)
                grad_q[..., rows, :] = slope @ k[..., keys, :]
                grad_k[..., keys, :] += slope.transpose(-2, -1) @ q[..., rows, :]
        grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
        grad_learned = None if grad_learned is None else grad_learned.to(learned.dtype)
        return grad_q, grad_k, grad_v, grad_learned, None, None, None


def _differentiable(
    plain: Plain, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor
) -> Iterator[Tensor | None]:
    """The gradients of those inputs that want one, with a graph of their own."""
    wanted = wanted[: len(inputs)]
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want and x is not None]
    out = plain(*(x for x in inputs if x is not None))
    found = iter(torch.autograd.grad(out, chosen, grad, create_graph=True))
    return (next(found) if want else None for want in wanted)


def _parts(q: Tensor, k: Tensor, learned: Tensor | None, logits: Logits) -> Iterator[tuple[slice, slice, Tensor]]:
    """A few rows, the keys that they may see, and the logits between them, at least float32."""
    total = q.shape[-2]
    for first in range(0, total, CHUNK):
        rows = slice(first, min(first + CHUNK, total))
        keys = slice(0, rows.stop if logits.is_causal else k.shape[-2])
        part = scaled_logits(q[..., rows, :], k[..., keys, :], logits.scale)
        if logits.shift is not None:
            part += _of_rows(logits.shift, rows)
        if logits.addend is not None and learned is not None:
            part += logits.addend.values(learned.to(part.dtype), rows, part.shape[-1])
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
