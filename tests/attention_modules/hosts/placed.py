"""A model of the table of hosts on another device, or in another dtype, than its inputs are made for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class Placed(nn.Module):
    """A model that takes its inputs to a device and, floating-point ones, to a dtype."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model, self.place, self.dtype = model, device, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        placed: dict[int, torch.Tensor] = {}

        def place(x: Any) -> Any:
            if not torch.is_tensor(x):
                return x
            if id(x) not in placed:
                placed[id(x)] = x.to(self.place, self.dtype if x.is_floating_point() else x.dtype)
            return placed[id(x)]

        args, kwargs = tree_map(place, (args, kwargs))
        return self.model(*args, **kwargs)
