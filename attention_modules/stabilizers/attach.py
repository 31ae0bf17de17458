"""A penalty of what a layer computes, added to the loss from within the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, ctx.saved_tensors[0], None


def attach_penalty(x: Tensor, penalty: Tensor, factor: Tensor) -> Tensor:
    """The same numbers, whose backward pass also adds ``factor`` times the gradient of the penalty.

    Equal to ``loss + penalty`` where the loss depends on x and its gradient starts at ``factor``.

    Args:
        x: any tensor on the way to the loss.
        penalty: a scalar.
        factor: what the backward pass starts with: 1, or the share of a batch and the scale of a gradient scaler.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.attach import attach_penalty
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> attach_penalty(x, x.square(), torch.tensor(1.0)).backward()
        >>> x.grad  # of x + x²
        tensor(7.)
    """
    return _Attached.apply(x, penalty, factor.to(penalty.dtype))
