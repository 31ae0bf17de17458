"""Inputs at which a function of token sequences is least smooth, by gradient ascent on its local Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from attention_modules.analysis.lipschitz import (
    Jacobian,
    check_generator,
    check_input,
    norms,
    start_vectors,
    twice_differentiable,
)
from attention_modules.mechanisms.shared.options import as_float


def ascend_lipschitz(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    steps: int = 30,
    length: float = 0.3,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Gradient ascent on log ‖D_x fn‖₂ from ``x``, every token kept at its norm, all samples at once.

    A step is one of the power method on JᵀJ, and one along the gradient of ‖Jv‖ for x with v and u = Jv/‖Jv‖ held,
    which is that of the largest singular value once these are its vectors. It moves a sample by ``length`` times its
    norm, less from step to step, down to a tenth. The adversarial inputs of Castin, Ablin and Peyré (ICML 2024) are
    found by gradient ascent too; rate, number of steps and norms are our choice.

    Args:
        fn: ``[B, n, d] -> [B, n, d']``, three times differentiable, as :func:`local_lipschitz` asks else.
        x: ``[B, n, d]``, float32 or float64.
        steps: how many; 0 gives ``x``.
        length: of the first step, in norms of the sample.
        generator: draws the starting vectors; None for fixed ones.

    Returns:
        Of all inputs that were seen, that of the largest ‖Jv‖, ``[B, n, d]``; ``x`` where ``fn`` is linear.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`local_lipschitz`, and if ``steps`` or ``length`` is out of its
            limits.

    Example:
        >>> import torch
        >>> from attnswap.analysis import ascend_lipschitz, local_lipschitz
        >>> x = torch.randn(1, 4, 3)
        >>> steepest = ascend_lipschitz(lambda x: x.softmax(1) @ x.mT, x, steps=3)
        >>> torch.allclose(steepest.norm(dim=-1), x.norm(dim=-1))
        True
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer of at least 0, got {steps!r}")
    if isinstance(length, bool) or not isinstance(length, Real):
        raise TypeError(f"length must be a number, got {length!r}")
    if not 0 < as_float(length) < math.inf:
        raise ValueError(f"length must be a finite number above 0, got {length!r}")
    check_generator(generator)
    check_input(x)
    sizes = x.norm(dim=2, keepdim=True)
    found, largest = x, x.new_full((len(x),), -1.0)
    with twice_differentiable(x.device):
        v = start_vectors(x, generator)
        for step in range(steps + 1):
            jacobian = Jacobian(fn, x)
            u = jacobian.times(v)
            value = norms(u)
            better = value > largest
            largest = value.where(better, largest)
            found = torch.where(better.view(-1, 1, 1), jacobian.x.detach(), found)
            if step == steps:
                break
            u = _unit(u)
            (pulled,) = torch.autograd.grad(jacobian.y, jacobian.x, u.view_as(jacobian.y), create_graph=True)
            gradient = _gradient((pulled.flatten(1) * v).sum(), jacobian.x)
            if gradient is None:  # fn is linear: no input is worse
                break
            v = _unit(pulled.detach().flatten(1))
            stride = length * 0.1 ** (step / steps)
            direction = _unit(gradient.flatten(1)).view_as(x)
            moved = jacobian.x.detach() + stride * sizes.norm(dim=1, keepdim=True) * direction
            x = moved * (sizes / moved.norm(dim=2, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny))
    return found


def _gradient(of: Tensor, x: Tensor) -> Tensor | None:
    """None where ``of`` does not depend on ``x``."""
    return torch.autograd.grad(of, x, allow_unused=True)[0] if of.requires_grad else None


def _unit(vectors: Tensor) -> Tensor:
    return vectors / norms(vectors).clamp(min=torch.finfo(vectors.dtype).tiny).unsqueeze(1)
