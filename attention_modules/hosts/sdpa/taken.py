"""Which calls ``scaled_dot_product_attention`` takes, and how it repeats and broadcasts what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from attention_modules.hosts.sdpa.calls import TARGET
from attention_modules.kernels import autocast_dtype


def taken(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> list[Tensor]:
    """Queries, keys and values with one shape before their rows, as PyTorch repeats and broadcasts them.

    Args:
        query: ``[..., H, N, d]``, or without heads.
        key: ``[..., H / groups, M, d]``.
        value: likewise.
        **given: the other arguments of the call.

    Raises:
        Exception: what PyTorch raises, of a call that it refuses.
        NotImplementedError: if it takes the call in a way of one of its kernels.
    """
    mask, dtype = given["attn_mask"], autocast_dtype(query)
    made = _spread([query, key, value], dtype, given.get("enable_gqa", False))
    if made is not None and _takes(mask, given["is_causal"], dtype, (*made[0].shape[:-1], key.shape[-2])):
        return made
    TARGET(query, key, value, **given)
    shapes = [None if each is None else tuple(each.shape) for each in (query, key, value, mask)]
    raise NotImplementedError(
        f"q, k, v and a mask of shapes {shapes} are no call of scaled_dot_product_attention for which a mechanism "
        "stands: give it q, k and v as [B, H, N, d], and a mask that broadcasts to [B, H, N, M]"
    )


def _spread(made: list[Tensor], dtype: torch.dtype, grouped: bool) -> list[Tensor] | None:
    """Those three with one shape before their rows; None where PyTorch does not broadcast them."""
    if not dtype.is_floating_point or any(autocast_dtype(each) != dtype for each in made):
        return None
    if min(each.dim() for each in made) < (3 if grouped else 2) or made[0].shape[-1] != made[1].shape[-1]:
        return None
    if grouped:
        heads = made[0].shape[-3]
        if any(each.shape[-3] == 0 or heads % each.shape[-3] != 0 for each in made):
            return None
        groups = [heads // each.shape[-3] for each in made]
        made = [x if each == 1 else x.repeat_interleave(each, -3) for x, each in zip(made, groups, strict=True)]
    outer = _common([each.shape[:-2] for each in made])
    if outer is None:
        return None
    return [each if each.shape[:-2] == outer else each.expand(*outer, *each.shape[-2:]) for each in made]


def _takes(attn_mask: Tensor | None, is_causal: bool, dtype: torch.dtype, logits: tuple[int, ...]) -> bool:
    """Whether PyTorch takes the mask beside logits of this shape; one of one dimension too, as some kernels do."""
    if attn_mask is None or is_causal:
        return attn_mask is None
    if isinstance(attn_mask, CausalBias):  # holds no values
        return True
    known = autocast_dtype(attn_mask) in (torch.bool, torch.float32, dtype)
    return known and _common([logits, attn_mask.shape]) == logits


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape to which these broadcast; None where they do not."""
    if all(each == shapes[0] for each in shapes):
        return shapes[0]
    dims = max(map(len, shapes))
    wide = [(1,) * (dims - len(each)) + tuple(each) for each in shapes]
    found = [next((size for size in sizes if size != 1), 1) for sizes in zip(*wide, strict=True)]
    fit = all(size == 1 or size == most for each in wide for size, most in zip(each, found, strict=True))
    return tuple(found) if fit else None
