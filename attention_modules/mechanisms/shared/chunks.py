"""Attention by maps that no fused kernel makes: a few rows at a time, computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import autocast, check_dropout, recomputed, taker, without_autocast
from attention_modules.masks import visible
from attention_modules.precision import scaled_logits

CHUNK = 128  # rows of a map that are held at once
Weights = Callable[[Tensor, Tensor, int], Tensor]


def exporting() -> bool:
    """Whether ``torch.export`` traces, in whose programs a loop over rows would fix the number of tokens."""
    return torch.compiler.is_exporting()


def refuse_free_length(number: int) -> None:
    """Refuse a number of tokens that ``torch.export`` leaves open, where it decides how many chunks there are.

    Raises:
        NotImplementedError: if it is open.
    """
    if exporting() and not isinstance(number, int):
        raise NotImplementedError(
            "a mechanism with a state goes through its tokens in chunks, whose number a program of torch.export fixes: "
            "export for one number of tokens (the batch may be free), or choose a mechanism without a state"
        )


def row_slices(tokens: int, size: int) -> Iterator[slice]:
    """A few rows at a time, of so many, and of none once; all at once in a program that ``torch.export`` makes.

    Args:
        tokens: number of rows.
        size: rows of one slice at most.
    """
    if exporting():
        yield slice(0, tokens)
        return
    for first in range(0, max(tokens, 1), size):
        yield slice(first, min(first + size, tokens))


def first_square(table: Tensor, tokens: int) -> Tensor:
    """The first rows and columns of a table of pairs of positions, ``[H, N, N]`` of ``[H, L, L]``."""
    if not exporting():
        return table[:, :tokens, :tokens]
    places = torch.arange(tokens, device=table.device)  # a slice would have a program refuse N = L
    return table.index_select(1, places).index_select(2, places)


def attend_by(
    weights: Weights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """weights(q kᵀ · scale + mask) v, with memory that is linear in the number of tokens.

    A program that ``torch.export`` makes holds the whole map.

    Args:
        weights: makes weights of logits ``[B, H, n, M]``, at least float32, of what each row sees, boolean,
            broadcastable to them, and of the place of the first row; what it gives for hidden keys is not read.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        attn_mask: boolean or additive ``[B|1, H|1, N|1, M|1]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: dropout of the weights.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d']``; zeros in rows that see nothing.
    """
    check_dropout(dropout_p)
    if (take := taker()) is not None:
        return take(weights, q, k, v, attn_mask, is_causal, scale)
    q, k, v = autocast(q), autocast(k), autocast(v)
    if k.shape[-2] == 0:  # no row has a largest logit
        return (q @ k.transpose(-2, -1)).to(v.dtype) @ v

    def rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: int) -> Tensor:
        with without_autocast(q.device):
            found = row_weights(weights, q, k, mask, first, is_causal, scale)
            if dropout_p > 0.0:
                found = F.dropout(found, dropout_p)
            return found.to(v.dtype) @ v

    if exporting() or q.shape[-2] <= CHUNK:
        return rows(q, k, v, attn_mask, 0)
    out = []
    for here in row_slices(q.shape[-2], CHUNK):
        mask = attn_mask
        last = here.stop if is_causal else k.shape[-2]
        keys, values = k[..., :last, :], v[..., :last, :]
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., here, :]
        out.append(recomputed(rows, q[..., here, :], keys, values, mask, here.start, random=dropout_p > 0.0))
    return torch.cat(out, -2)


def row_weights(
    weights: Weights, q: Tensor, k: Tensor, mask: Tensor | None, first: int, is_causal: bool, scale: float | None
) -> Tensor:
    """The weights of some rows, ``[B, H, n, M]``, at least float32, 0 where a key is hidden.

    Args:
        weights, k, is_causal, scale: as :func:`attend_by`.
        q: queries of these rows, ``[B, H, n, d]``.
        mask: of these rows.
        first: the place of the first of them.
    """
    with without_autocast(q.device):
        logits = scaled_logits(q, k, scale)
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device) if mask is None else visible(mask)
        if mask is not None and mask.dtype != torch.bool:
            logits = logits + mask.masked_fill(~seen, 0.0)
        if is_causal:
            last = torch.arange(first, first + q.shape[-2], device=q.device)
            seen = torch.arange(k.shape[-2], device=q.device) <= last.unsqueeze(-1)
            seen = seen.view(1, 1, *seen.shape)
        return torch.where(seen, weights(logits, seen, first), logits.new_zeros(()))
