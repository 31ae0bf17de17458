"""A linear map that belongs to a mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OwnLinear(nn.Module):
    """A linear map of a mechanism; no `nn.Linear`, so that what initializes a model's linear layers leaves it alone.

    Args:
        in_features: features of its input.
        out_features: features of its output.
        bias: whether it has a bias.
        std: standard deviation of the weights at the start; where None, weights and bias start as in `nn.Linear`.
        start: of each bias, where ``std`` is given.
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, std: float | None = None, start: float = 0.0
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.std, self.start = in_features, out_features, std, start
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew."""
        own: Any = self
        nn.Linear.reset_parameters(own)
        if self.std is not None:
            nn.init.normal_(self.weight, std=self.std)
            if self.bias is not None:
                nn.init.constant_(self.bias, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
