"""Whether the columns of a layer's map are the positions of its tokens, as a learned map of positions needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.masks import visible


def check_positions(name: str, positions: Tensor, hidden: Tensor | None, by_distance: bool = False) -> None:
    """Refuse positions that are not those of the columns; on a GPU checked without a sync.

    Args:
        name: of the mechanism.
        positions: ``[..., B or 1, N]``.
        hidden: which tokens nobody sees, ``[B, N]``: they may be anywhere.
        by_distance: whether only distances count, so that sequences may begin anywhere, one after the other.

    Raises:
        RuntimeError: if they are others.
    """
    if by_distance:
        step = positions[..., 1:] - positions[..., :-1]
        right, what = (step == 1) | (positions[..., 1:] == 0), "do not rise by one from token to token"
        hidden = None if hidden is None else hidden[..., 1:] | hidden[..., :-1]
    else:
        right = positions == torch.arange(positions.shape[-1], device=positions.device)
        what = "are not 0 to N - 1 (packed sequences, or padding before them)"
    torch._assert_async(
        (right if hidden is None else right | hidden).all(),
        f"{name} counts columns, and these position_ids {what}: give each sequence a row of its own, padded at its end",
    )


def check_columns(module: Any, mask: Tensor | None, positions: Tensor | None, window: int | None) -> None:
    """Refuse packed sequences and padding before a sequence; on a GPU checked without a sync.

    Args:
        module: the swapped layer.
        mask: ``[B, 1 or H, N, M]`` or None.
        positions: what the model knows, ``[..., B or 1, N]`` or None.
        window: how many keys rows see; None for all.

    Raises:
        RuntimeError: if the positions of what is seen are not 0 to N - 1 from the first column on, or a row sees tokens
            but not the first one, or, where positions are not known, not all before its last one. Beyond a sliding
            window no row sees the first: there some row must.
    """
    name = type(module.mechanism).__name__
    seen = None if mask is None else visible(mask)
    by_distance = not module.mechanism.counts_columns
    if positions is not None:
        known = seen is not None and seen.shape[-1] == positions.shape[-1]
        check_positions(name, positions, ~seen.flatten(1, -2).any(1) if known else None, by_distance)  # type: ignore[union-attr]
    if seen is None or by_distance:
        return
    first = seen[..., 0] | ~seen.any(-1)
    if window is not None:
        first = seen[..., 0].any(-1) | ~seen.flatten(-2).any(-1)
        if getattr(module, "is_causal", True) and seen.shape[-2] == seen.shape[-1]:  # rows of tokens see their window
            rows = torch.arange(1, seen.shape[-1] + 1, device=seen.device).clamp(max=window)
            whole = (seen.sum(-1) == rows) | ~seen.diagonal(dim1=-2, dim2=-1)
            first = first & whole.all(-1)
    elif positions is None:  # then a model that counts positions may count what is seen alone
        first = first & (seen[..., 1:] <= seen[..., :-1]).all(-1)
    torch._assert_async(
        first.all(),
        f"{name} counts columns, and this mask hides a token from rows that see later ones (padding before or between, "
        "or packed sequences): give each sequence a row of its own, padded at its end",
    )
