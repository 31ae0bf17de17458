"""The map that a layer returns, kept on the graph: its gradient is that of the map which mixed the values."""

from __future__ import annotations

import torch
from torch import Tensor


class ShownMap(list[Tensor]):
    """The list that a mechanism adds its map to, and mixes the values with what it finds there.

    A view of the map would have no gradient, as nothing is computed of it; so where the layer returns a part of the
    map, or one of another shape, the mechanism is given back what is put together of that part.

    Args:
        keys: the first keys, which the layer's caller knows of; None for all.
        batched: whether the caller knows of the batch, which has one sample where not.
    """

    def __init__(self, keys: int | None = None, batched: bool = True) -> None:
        super().__init__()
        self.keys, self.batched = keys, batched
        self.shown: Tensor | None = None

    def append(self, found: Tensor) -> None:
        """Add a map ``[B, H, N, M]``."""
        self.shown = found
        if self.keys is not None and self.keys < found.shape[-1]:
            self.shown, rest = found[..., : self.keys], found[..., self.keys :]
            found = torch.cat([self.shown, rest], -1)
        elif not self.batched:
            self.shown = found.squeeze(0)
            found = self.shown.unsqueeze(0)
        super().append(found)
