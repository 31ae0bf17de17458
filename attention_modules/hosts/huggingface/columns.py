"""Whether the columns of a layer's map are the positions of its tokens, as a learned map of positions needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attention_modules.masks import check_columns, require, visible

_CURE = "give each sequence a row of its own, padded at its end"


def check_positions(name: str, positions: Tensor, hidden: Tensor | None, by_distance: bool = False) -> None:
    """Refuse positions that are not those of the columns; on a GPU checked without a sync.

    Args:
        name: of the mechanism.
        positions: ``[..., B or 1, N]``.
        hidden: which tokens nobody sees, ``[B, N]``: they may be anywhere.
        by_distance: whether only distances count, so that sequences may begin anywhere, one after the other.

    Raises:
        ValueError, RuntimeError: if they are others, as :func:`attention_modules.masks.require` says.
    """
    if by_distance:
        right, what = _keeps_distances(positions, hidden), "do not rise by as many as the columns from token to token"
    else:
        right = positions == torch.arange(positions.shape[-1], device=positions.device)
        what = "are not 0 to N - 1 (packed sequences, padding before them, or a model that counts from 1)"
    require(
        (right if hidden is None else right | hidden).all(),
        f"{name} counts columns, and these position_ids {what}: {_CURE}",
    )


def _keeps_distances(positions: Tensor, hidden: Tensor | None) -> Tensor:
    """Whether a token is as far from the last that is seen as their columns are, or begins a sequence."""
    columns = torch.arange(positions.shape[-1], device=positions.device)
    seen = torch.ones_like(positions, dtype=torch.bool) if hidden is None else ~hidden
    apart, seen = torch.broadcast_tensors(positions - columns, seen)
    last = torch.where(seen, columns, -1).cummax(-1).values[..., :-1]
    step = apart[..., 1:] - apart.gather(-1, last.clamp(min=0))
    right = (step == 0) | (last < 0) | (positions[..., 1:] == 0)
    return functional.pad(right, (1, 0), value=True)


def check_sequences(module: Any, mask: Tensor | None, positions: Tensor | None, window: int | None) -> None:
    """Refuse packed sequences and padding before a sequence; on a GPU checked without a sync.

    Args:
        module: the swapped layer.
        mask: ``[B, 1 or H, N, M]`` or None.
        positions: what the model knows, ``[..., B or 1, N]`` or None.
        window: how many keys rows see; None for all.

    Raises:
        ValueError, RuntimeError: if positions (:func:`check_positions`) or the mask say so
            (:func:`attention_modules.masks.check_columns`).
    """
    name = type(module.mechanism).__name__
    seen = None if mask is None else visible(mask)
    by_distance = not module.mechanism.counts_columns
    if positions is not None:
        known = seen is not None and seen.shape[-1] == positions.shape[-1]
        check_positions(name, positions, ~seen.flatten(1, -2).any(1) if known else None, by_distance)  # type: ignore[union-attr]
    if seen is None or by_distance:
        return
    check_columns(name, seen, positions is not None or window is not None)  # else what is seen alone may be counted
