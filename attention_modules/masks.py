"""Attention masks: one reading of boolean, additive and causal masks for every mechanism."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from attention_modules.kernels import untransformed

# Additive masks are written with -inf, the lowest number of a dtype, -1e9 or -1e4, which bfloat16 rounds to -9,984; exp
# of each is zero. An integer: with dynamic=True, torch.compile cannot read a module's float in a part that is computed
# again in the backward pass.
HIDDEN = -9984
SINKS = "attnswap_sinks"  # noted at keys: how many at their end are of no token
OTHERS = "attnswap_of_other_tokens"  # noted at keys: whether they are of other tokens than the queries, a boolean


def without_causal_bias(attn_mask: Tensor | None, is_causal: bool, q: Tensor) -> tuple[Tensor | None, bool]:
    """A mask, and ``is_causal``, where the mask may be one of PyTorch's causal biases, which hold no values.

    Args:
        attn_mask: as PyTorch takes it, of :func:`torch.nn.attention.bias.causal_upper_left` too.
        is_causal: row i sees keys 0 to i only.
        q: queries, for their device.
    """
    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal
    if attn_mask.seq_len_q == attn_mask.seq_len_kv:
        return None, True
    return attn_mask._materialize(q.device), is_causal


def seen_tokens(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Which tokens of self-attention some row sees by the mask, boolean ``[B, N]``; None where it says nothing of them.

    What the others attend to (padding, say) reaches nobody. Nor does a token that sees itself alone and none other
    sees, in a sample where some see each other (as with the mask ``seen & seen.T | eye``). All do where a host has
    noted at the keys that they are of other tokens.

    Args:
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, N]``.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``, and behind them sinks as a host has noted.
    """
    tokens = k.shape[-2] - getattr(k, SINKS, 0)
    if attn_mask is None or q.shape[-2] != tokens or attn_mask.shape[-1] != k.shape[-2]:
        return None
    if attn_mask.ndim == 4 and attn_mask.shape[0] not in (1, len(q)):
        return None
    mask = attn_mask.detach()[..., :tokens].reshape((1,) * (4 - attn_mask.ndim) + (*attn_mask.shape[:-1], tokens))
    rows = visible(mask).any(1)
    seen = rows.any(1)
    if rows.shape[1] == tokens:
        others = rows & ~torch.eye(tokens, dtype=torch.bool, device=rows.device)
        linked = others.any(1) | others.any(2)
        seen = seen & (linked | ~linked.any(1, keepdim=True))
    return (seen | getattr(k, OTHERS, False)).expand(len(q), -1)


def not_padding(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """As :func:`seen_tokens`, but None where several samples share one mask of rows: what that hides is no padding.

    Its outputs may be what a model is asked for, as the targets of a neural process.
    """
    mask = attn_mask
    if mask is not None and len(q) > 1 and mask.ndim > 1 and mask.shape[-2] > 1 and (mask.ndim < 4 or len(mask) == 1):
        return None
    return seen_tokens(mask, q, k)


def check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Check that a mask is boolean or floating and broadcasts to ``[B, H, N, M]``.

    Raises:
        TypeError: if the mask is neither boolean nor floating.
        ValueError: if its shape does not broadcast.
    """
    if attn_mask is None:
        return
    if isinstance(attn_mask, CausalBias):
        raise TypeError("attn_mask is a causal bias of PyTorch, which holds no values: pass is_causal=True instead")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask must be boolean (True = may be seen) or floating (added to the logits), got {attn_mask.dtype}; "
            "call .bool() on a 0/1 mask"
        )
    full = (*q.shape[:-1], k.shape[-2])
    size = tuple(attn_mask.shape)
    last = full[-len(size) :] if size else ()
    # No `m in (1, f)`, which torch 2.9 cannot compile with free sizes.
    fits = len(size) <= len(full) and all(m == 1 or m == f for m, f in zip(size, last, strict=True))
    if not fits:
        raise ValueError(
            f"attn_mask of shape {size} does not broadcast to [batch, heads, queries, keys] = {full}; "
            "a padding mask [batch, keys] goes in as mask[:, None, None, :]"
        )


def check_causal(is_causal: bool, q: Tensor, k: Tensor) -> None:
    """Check that ``is_causal`` has one meaning: as many queries as keys.

    Raises:
        ValueError: if it is set for different numbers of queries and keys.
    """
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"is_causal needs as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}; "
            "pass attn_mask that says which keys each query may see"
        )


def combine_masks(
    attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor, scale: float | None = None
) -> tuple[Tensor | None, bool]:
    """Check a mask and fold ``is_causal`` into it where both are given, or where ``scale`` is not positive.

    Args:
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        scale: factor on the logits. PyTorch's CPU kernel multiplies the -inf of ``is_causal`` by it, which is NaN for 0
            and visible for less: there causality becomes a mask.

    Returns:
        The mask, ``[B|1, H|1, N|1, M|1]``, and what is left of ``is_causal``: never both.

    Raises:
        TypeError, ValueError: as :func:`check_mask` and :func:`check_causal`.
    """
    check_mask(attn_mask, q, k)
    check_causal(is_causal, q, k)
    if attn_mask is None:
        if not is_causal or scale is None or scale > 0:
            return None, is_causal
        attn_mask = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    # PyTorch's fused attention takes two or four dimensions, and leaves three to its slow form.
    attn_mask = attn_mask.view((1,) * (q.dim() - attn_mask.dim()) + tuple(attn_mask.shape))
    if not is_causal:
        return attn_mask, False
    past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if attn_mask.dtype == torch.bool:
        return attn_mask & past, False
    return attn_mask.masked_fill(~past, float("-inf")), False


def hide(attn_mask: Tensor | None) -> Tensor | None:
    """An additive mask with -inf wherever it hides, so that a row with nothing visible gives zeros."""
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return attn_mask
    return attn_mask.masked_fill(attn_mask <= HIDDEN, float("-inf"))


def visible(attn_mask: Tensor) -> Tensor:
    """Which keys a mask lets each row see, boolean, in the mask's shape.

    The one rule for mechanisms and statistics (our reading): True, or a bias above -9,984 (-1e4 in bfloat16).
    """
    return attn_mask if attn_mask.dtype == torch.bool else ~(attn_mask <= HIDDEN)  # NaN is seen


def check_columns(name: str, attn_mask: Tensor, between: bool = True) -> None:
    """Refuse a mask by which columns are not the positions of tokens: packed sequences, padding before a sequence.

    Taken is one that shows its first column, and each key that it shows to every row which sees a later one: the
    causal triangle, padding behind, tokens hidden from all. So is a window: what a row sees is a matter of distance.

    Args:
        name: of a mechanism that learns something of each position by its column.
        attn_mask: boolean or additive, ``[..., N, M]``.
        between: whether tokens may be hidden from all between others.

    Raises:
        ValueError, RuntimeError: if they are not, as :func:`require` says.
    """
    seen = visible(torch.atleast_2d(attn_mask))
    if not seen.numel():
        return
    shown, columns = seen.any(-2, keepdim=True), torch.arange(seen.shape[-1], device=seen.device)
    last = torch.where(seen, columns, -1).amax(-1, keepdim=True)
    fits = (seen | ~shown | (columns > last)).flatten(-2).all(-1)
    behind = (shown[..., 1:] <= shown[..., :-1]).flatten(-2).all(-1)
    if seen.shape[-1] == seen.shape[-2]:
        alike = (seen[..., 1:, 1:] == seen[..., :-1, :-1]) | ~shown[..., 1:] | (last[..., 1:, :] < 0)
        fits = fits | (alike.flatten(-2).all(-1) & behind)
    fits = fits & (shown[..., 0] | ~shown.any(-1)).squeeze(-1)
    require(
        (fits if between else fits & behind).all(),
        f"{name} counts columns, and this mask hides a token from rows that see later ones (padding before a sequence, "
        "packed sequences, a tree): give each sequence a row of its own, padded at its end, or take another mechanism",
    )


def tokens_of(name: str, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> tuple[Tensor | None, bool]:
    """Which tokens are there, where rows see the same tokens but for the future: masks of a state that tokens fill.

    Taken are masks of padding, and the causal triangle combined with one, written out for each row as models hand it
    over. Rows of tokens that are not there may see everything, or nothing.

    Args:
        name: of the mechanism, for messages.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, N]``; where it is additive, 0 or hidden.
        is_causal: row i sees keys 0 to i only.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.

    Returns:
        Boolean ``[B|1, H|1, N]``, None where all tokens are there; and whether the future is hidden, or a first token
        alone is seen.

    Raises:
        TypeError, ValueError: as :func:`check_mask` and :func:`check_causal`; if it is another mask, where compiled
            code and what runs on a GPU find that only as they run (RuntimeError).
    """
    check_mask(attn_mask, q, k)
    number = k.shape[-2]
    if q.shape[-2] != number:
        raise ValueError(
            f"{name} attention needs one query for each key, got {q.shape[-2]} and {number}: what stands for earlier "
            "tokens is its state"
        )
    if attn_mask is None:
        return None, is_causal
    attn_mask = attn_mask.view((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    seen = visible(attn_mask)
    if attn_mask.dtype != torch.bool:
        require(
            (~seen | (attn_mask == 0)).all(),
            f"{name} attention has no logits to which a bias could be added: it takes additive masks of 0 and -inf "
            "alone",
        )
    if seen.shape[-2] == 1 or number == 1:
        return seen[..., -1, :].expand(*seen.shape[:2], number), is_causal
    past = torch.ones(number, number, dtype=torch.bool, device=k.device).tril()
    seen = seen.expand(*seen.shape[:2], number, number)
    any_row = seen.any(-2)
    same = ((seen == any_row.unsqueeze(-2)).all(-1) | ~(seen.any(-1) | any_row)).all()
    if not is_causal and not torch.compiler.is_compiling() and bool(same):
        return any_row, not bool(any_row[..., 1:].any())  # a first token alone is seen with and without a future
    future = (seen & ~past).any(-1)
    if is_causal:
        seen, future = seen & past, torch.zeros_like(future)
    there = seen.diagonal(dim1=-2, dim2=-1) & ~future
    nothing_or_all = ~there & (seen.all(-1) | ~seen.any(-1))
    fits = (seen == (past & there.unsqueeze(-2))).all(-1) | nothing_or_all
    require(
        fits.all(),
        f"{name} attention lets all rows see the same tokens but for the future, so it takes masks of padding and "
        f"causality alone, and this one of shape {tuple(attn_mask.shape)} tells rows apart in another way (a sliding "
        "window, a tree, packed sequences)",
    )
    return there, True


def require(condition: Tensor, message: str) -> None:
    """Refuse values without waiting for a device: a GPU and compiled code say so as they run.

    Raises:
        ValueError: if it does not hold; there a RuntimeError, later.
    """
    if not torch.compiler.is_compiling():
        condition = untransformed(condition).all()
    if torch.compiler.is_compiling() or condition.device.type != "cpu":
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
