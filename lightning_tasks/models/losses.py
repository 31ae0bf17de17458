"""Cross-entropy over a vocabulary in chunks of tokens, so that the logits of all tokens never exist together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
# Why not torch 2.14's `linear_cross_entropy` with a chunk size: it leaves autocast aside and multiplies in float32, its
# loss of bfloat16 inputs is a bfloat16, it has no probabilities of single tokens, and older torch does not have it.
# Its peak is the same: 64 MB over the inputs at 4,096 x 128 x 33,278, for both (float32, on a CPU with one thread, by
# `python benchmarks/cross_entropy.py --peak chunked locater`, and `--peak "torch chunked" locater`).


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(tokens: int, chunk_size: int) -> Iterator[slice]:
    """The rows of each chunk."""
    return (slice(start, start + chunk_size) for start in range(0, tokens, chunk_size))


def _buffer(head: Tensor, tokens: int, chunk_size: int) -> Tensor:
    """Room for the logits of a chunk: new memory for each costs as much as a quarter of their product."""
    return head.new_empty(min(chunk_size, tokens), head.shape[0])


def _logits(chunk: Tensor, head: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Logits ``[c, V]`` (fp32 or fp64) of a chunk's hidden states ``[c, D]``, in the buffer if of its dtype."""
    logits = torch.mm(chunk, head.T, out=buffer[: len(chunk)]).to(_sum_dtype(head.dtype))
    return logits if bias is None else logits.add_(bias)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the token losses; the gradients are computed beside the loss, while a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_size: int,
        ignore_index: int,
        dtype: torch.dtype,
        wants: tuple[bool, bool, bool],
    ) -> Tensor:
        sums = _sum_dtype(dtype)
        wants_hidden, wants_weight, wants_bias = wants
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sums) if wants_weight else None
        grad_bias = hidden.new_zeros(weight.shape[0], dtype=sums) if wants_bias else None
        total = hidden.new_zeros((), dtype=sums)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            buffer = _buffer(head, len(hidden), chunk_size)
            for rows in _chunks(len(hidden), chunk_size):
                chunk = hidden[rows].to(dtype)
                logits = _logits(chunk, head, bias, buffer)
                kept = targets[rows] != ignore_index
                index = targets[rows].where(kept, 0).unsqueeze(1)
                target = logits.gather(1, index)
                highest = logits.amax(1, keepdim=True)
                powers = logits.sub_(highest).exp_()  # in place, and once for the loss and its slope
                normalizer = powers.sum(1, keepdim=True)
                total += ((normalizer.log() + highest - target).squeeze(1) * kept).sum()
                if not any(wants):
                    del logits, powers
                    continue
                # d loss / d logits = softmax - one-hot, [c, V]
                slope = powers.mul_(kept.unsqueeze(1) / normalizer)
                slope.scatter_add_(1, index, -kept.unsqueeze(1).to(slope.dtype))
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
                slope = slope.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (slope @ head).to(hidden.dtype)
                if grad_weight is not None and dtype == sums:
                    grad_weight.addmm_(slope.T, chunk)  # no second [V, D]
                elif grad_weight is not None:
                    grad_weight += slope.T @ chunk
                del logits, powers, slope  # else they would stand beside the next chunk's
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * grad_output).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    chunk_size: int = 256,
) -> Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` without ever holding the logits of more than one chunk.

    Loss and gradients are computed in one go; second derivatives are refused. Under autocast the matrix products
    run in its dtype, sums and the softmax in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[..., D]``, any number of leading axes.
        weight: ``[V, D]``, the head's weight (it may be the embedding's).
        targets: ``[...]`` int64 in 0 to V - 1, or ``ignore_index``.
        bias: ``[V]`` or None.
        ignore_index: targets that count neither in the sum nor in the mean.
        reduction: "mean" over the tokens that count, or "sum". With no token to count both are 0.
        chunk_size: tokens a chunk; memory is about ``chunk_size * V`` floats.

    Returns:
        A scalar in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: for an unknown reduction, a chunk size below 1, or shapes that do not fit.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    rows, labels = _flatten(hidden, weight, targets, bias, chunk_size)
    recording = torch.is_grad_enabled()
    wants = tuple(recording and tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias))
    total = _ChunkedCrossEntropy.apply(
        rows, weight, bias, labels, chunk_size, ignore_index, _compute_dtype(hidden), wants
    )
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


@torch.no_grad()
def token_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 256,
) -> Tensor:
    """ln p(target) of every token, in chunks and without gradient; 0 where the target is ignored.

    Arguments and errors as for :func:`chunked_cross_entropy`. Returns the shape of ``targets``, in nats.
    """
    rows, labels = _flatten(hidden, weight, targets, bias, chunk_size)
    dtype = _compute_dtype(hidden)
    result = rows.new_zeros(labels.shape, dtype=_sum_dtype(dtype))
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(dtype)
        buffer = _buffer(head, len(rows), chunk_size)
        for where in _chunks(len(rows), chunk_size):
            logits = _logits(rows[where].to(dtype), head, bias, buffer)
            kept = labels[where] != ignore_index
            index = labels[where].where(kept, 0).unsqueeze(1)
            result[where] = (logits.gather(1, index) - logits.logsumexp(1, keepdim=True)).squeeze(1) * kept
    return result.view(targets.shape)


def _flatten(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Hidden states ``[tokens, D]`` and targets ``[tokens]``, after checking that everything fits."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} needs targets {list(hidden.shape[:-1])}, got {list(targets.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be [V, {hidden.shape[-1]}] as hidden has that width, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    return hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
