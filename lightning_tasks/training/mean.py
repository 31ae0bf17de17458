"""The mean of a loss over a split, which stays NaN where any of its values is."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric


class WeightedMean(MeanMetric):
    """Mean of values by their weights, over batches and processes; NaN and infinite values stay what they are.

    torchmetrics' ``MeanMetric`` leaves NaN out by default, so that (1, NaN) has the mean 1. With
    ``nan_strategy="disable"`` it keeps NaN, but gives every value the weight 1 (torchmetrics 1.9), so that a short
    last batch counts as much as a whole one.

    >>> mean = WeightedMean()
    >>> mean.update(torch.tensor(1.0), 3)
    >>> mean.update(torch.tensor(5.0), 1)
    >>> mean.compute()
    tensor(2.)
    >>> mean.update(torch.tensor(torch.nan), 1)
    >>> mean.compute()
    tensor(nan)
    """

    def __init__(self) -> None:
        super().__init__(nan_strategy="disable")

    def update(self, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        """Add values, of any shape.

        Args:
            value: what the mean is taken of.
            weight: of each value, broadcast to them; 1 where None. A value of weight 0, such as the mean loss of a
                batch without tokens, does not count, even where it is NaN.
        """
        value = torch.as_tensor(value, dtype=self.dtype, device=self.device)
        weight = torch.as_tensor(1.0 if weight is None else weight, dtype=self.dtype, device=self.device)
        self.mean_value += torch.where(weight == 0, 0.0, value * weight).sum()
        self.weight += weight.broadcast_to(value.shape).sum()
