"""Sparse L1 descent: steps in the few coordinates of the largest gradient, in the ball of the L1 norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    GRADIENT,
    Best,
    check_batch,
    check_options,
    check_radius,
    cross_entropies,
    detached,
    logits_of,
    losses_and_gradient,
    register_attack,
)
from lightning_tasks.robustness.attacks.released import convention
from lightning_tasks.robustness.tested_model import Model, held_still

STEPS, STEP_SHARE, SPARSITY = 20, 0.1, 99.0


@register_attack(white_box=True, norm="L1", passes=lambda options: 1 + GRADIENT * options["steps"])
def sparse_l1_descent(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    steps: int = STEPS,
    step_size: float | None = None,
    sparsity: float = SPARSITY,
) -> Tensor:
    """The images of the highest cross-entropy among all that sparse steps in the L1 ball pass through.

    Sparse L1 descent (Tramèr and Boneh, NeurIPS 2019): a step of L1 norm ``step_size`` goes evenly into the coordinates
    whose gradient is beyond a percentile. A change that is too long is scaled to ``eps``.

    Args:
        model, images, labels: see :func:`~lightning_tasks.robustness.fgsm`.
        eps: the largest L1 norm of a change, above 0: the sum over all values of the image.
        steps: gradient steps.
        step_size: L1 norm of a step; eps / 10 where None.
        sparsity: percentile of the gradient's absolute values below which a coordinate is left, above 0 and below 100.

    Returns:
        ``[B, C, H, W]``, in [0, 1] and within ``eps``.

    Raises:
        ValueError: if ``eps``, the images, the labels or an option are out of range, or the model gives no gradient.
        TypeError: for other dtypes.

    Example:
        >>> import torch
        >>> from lightning_tasks.robustness import sparse_l1_descent
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
        >>> images = torch.full((1, 3, 2, 2), 0.5)
        >>> attacked = sparse_l1_descent(model, images, torch.tensor([0]), eps=0.25)
        >>> round((attacked - images).abs().sum().item(), 4)
        0.25
    """
    eps = check_radius(eps, finite=True)
    check_batch(images, labels)
    check_options(steps=steps, step_size=step_size, sparsity=sparsity)
    step_size = STEP_SHARE * eps if step_size is None else step_size
    with held_still(model, gradients=True):
        images, labels = detached(images, labels)
        with torch.no_grad():
            best = Best(images, cross_entropies(logits_of(model, images, labels), labels))
        one = torch.ones_like(images[:1, :, :1, :1])
        for points, losses in _descent(model, images, labels, one, True, eps, steps, step_size, sparsity):
            best.update(points, losses)
        return best.points


@register_attack(white_box=True, norm="L1", passes=lambda options: 1 + GRADIENT * STEPS)
def released_sparse_l1_descent(
    model: Model, images: Tensor, labels: Tensor, *, eps: float, std: Sequence[float]
) -> Tensor:
    """The last of 20 sparse steps of ``eps`` / 10 away from the model's own prediction, unclipped.

    The code released with RPC-Attention calls cleverhans 4.0 with its defaults: eps 10 in units of the normalized
    image, steps of 1, the coordinates beyond the 99th percentile.

    Args:
        model, images, labels, std: see :func:`~lightning_tasks.robustness.released_fgsm`, as the errors.
        eps: the largest L1 norm of the change of the normalized image, above 0.
    """
    eps = check_radius(eps, finite=True)
    with convention(model, images, labels, std) as (clean, own, scale):
        for last, _ in _descent(model, clean, own, scale, False, eps, STEPS, STEP_SHARE * eps, SPARSITY):  # noqa: B007
            pass
        return last


def _descent(
    model: Model,
    images: Tensor,
    labels: Tensor,
    scale: Tensor,
    clip: bool,
    eps: float,
    steps: int,
    step_size: float,
    sparsity: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each point after a step, with its losses ``[B]``; changes count in units of ``scale``, ``[1 or C, 1, 1]``."""
    count = max(int(sparsity / 100 * images[0].numel()), 1)
    points = images
    _, gradient = losses_and_gradient(model, points, labels)
    for _ in range(steps):
        slope = (gradient * scale).flatten(1)
        largest = slope.abs() >= slope.abs().kthvalue(count, dim=1, keepdim=True).values
        step = (slope.sign() * largest / largest.sum(1, keepdim=True)).view_as(images)
        points = points + scale * step_size * step
        points = points.clamp(0, 1) if clip else points
        change = (points - images) / scale
        points = images + scale * change.renorm(p=1, dim=0, maxnorm=eps)
        points = points.clamp(0, 1) if clip else points
        losses, gradient = losses_and_gradient(model, points, labels)
        yield points, losses
