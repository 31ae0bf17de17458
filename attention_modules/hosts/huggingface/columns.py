"""Whether the columns of a layer's map are the positions of its tokens, as a learned map of positions needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_modules.masks import visible


def check_columns(module: Any, mask: Tensor | None, positions: Tensor | None, windowed: bool) -> None:
    """Refuse packed sequences and padding before a sequence; on a GPU checked without a sync.

    Args:
        module: the swapped layer.
        mask: ``[B, 1 or H, N, M]`` or None.
        positions: what the model knows, ``[..., B or 1, N]`` or None.
        windowed: whether rows see a window of keys.

    Raises:
        RuntimeError: if positions are not 0 to N - 1 from the first column on, or a row sees tokens but not the first
            one. Beyond a sliding window no row sees that one: there some row must.
    """
    name = type(module.mechanism).__name__
    if positions is not None:
        columns = torch.arange(positions.shape[-1], device=positions.device)
        torch._assert_async(
            (positions == columns).all(),
            f"{name} counts columns, and these position_ids are not 0 to N - 1 (packed sequences, or padding before "
            "them): give each sequence a row of its own, padded at its end",
        )
    if mask is None:
        return
    seen = visible(mask)
    first = seen[..., 0] | ~seen.any(-1)
    if windowed:
        first = seen[..., 0].any(-1) | ~seen.flatten(-2).any(-1)
    torch._assert_async(
        first.all(),
        f"{name} counts columns, and this mask hides the first token from rows that see others (padding before a "
        "sequence, or packed sequences): give each sequence a row of its own, padded at its end",
    )
