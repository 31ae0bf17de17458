"""Whether the columns of a layer's map are the positions of its tokens, as a learned map of positions needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.masks import check_columns, require, visible


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
        step = positions[..., 1:] - positions[..., :-1]
        right, what = (step == 1) | (positions[..., 1:] == 0), "do not rise by one from token to token"
        hidden = None if hidden is None else hidden[..., 1:] | hidden[..., :-1]
    else:
        right = positions == torch.arange(positions.shape[-1], device=positions.device)
        what = "are not 0 to N - 1 (packed sequences, or padding before them)"
    require(
        (right if hidden is None else right | hidden).all(),
        f"{name} counts columns, and these position_ids {what}: give each sequence a row of its own, padded at its end",
    )


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
