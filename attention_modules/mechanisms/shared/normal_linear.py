"""A linear map with a start of its own."""

from __future__ import annotations

from torch import nn


class NormalLinear(nn.Linear):
    """A linear map whose weights start normal and whose bias at one number, also where tools reset it by itself.

    Args:
        in_features: features of its input.
        out_features: features of its output.
        std: standard deviation of the weights at the start.
        start: of each bias.
    """

    def __init__(self, in_features: int, out_features: int, std: float, start: float) -> None:
        self.std, self.start = std, start
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.weight, std=self.std)
        nn.init.constant_(self.bias, self.start)
