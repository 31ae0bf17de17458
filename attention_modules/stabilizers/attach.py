"""A penalty of what a layer computes, added to the loss from within the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Attached(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(penalty: Callable[..., Tensor | None], *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.penalty, *parts = inputs
        ctx.save_for_backward(*parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        again = torch.is_grad_enabled()  # somebody differentiates this backward pass
        with torch.enable_grad():
            parts = [part.view_as(part) if again else part.detach().requires_grad_() for part in ctx.saved_tensors]
            penalty = ctx.penalty(*parts)
        if penalty is None:
            return None, *grads
        added = torch.autograd.grad(penalty, parts, create_graph=again, materialize_grads=True)
        return None, *(grad + more for grad, more in zip(grads, added, strict=True))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)


def attach_penalty(penalty: Callable[..., Tensor | None], *parts: Tensor) -> tuple[Tensor, ...]:
    """The same numbers, whose backward pass also adds the gradient of a penalty of them.

    Equal to ``loss + penalty(*parts)`` where the loss depends on all parts. The penalty is computed in the backward
    pass, and no graph of it is held until then.

    Args:
        penalty: called in each backward pass that comes by; gives a scalar, times what the gradient of the loss starts
            with (a gradient scaler's scale), or None where this pass is not to have the penalty.
        parts: tensors on the way to the loss.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.attach import attach_penalty
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> (y,) = attach_penalty(torch.square, x)
        >>> y.backward()
        >>> x.grad  # of x + x²
        tensor(7.)
    """
    return _Attached.apply(penalty, *parts)
