"""HopSkipJump: the smallest change in the L2 norm, from the model's decisions alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    check_batch,
    check_options,
    check_radius,
    detached,
    logits_of,
    register_attack,
    within,
)
from lightning_tasks.robustness.tested_model import Model, held_still

_STARTS, _HALVINGS = 100, 40
_FIRST_DELTA = 0.1

Decide = Callable[[Tensor], Tensor]
"""Whether points ``[B, C, H, W]`` are classified wrongly, ``[B]``."""


def _passes(options: Mapping[str, Any]) -> float:
    counts = (_samples(step, options["initial_samples"], options["most_samples"]) for step in range(options["steps"]))
    return _STARTS + float(sum(counts)) + _HALVINGS * options["steps"]


@register_attack(white_box=False, norm="L2", smallest=True, passes=_passes)
def hop_skip_jump(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = math.inf,
    steps: int = 64,
    initial_samples: int = 100,
    most_samples: int = 10_000,
    seed: int = 0,
) -> Tensor:
    """The nearest images in the L2 norm that are classified wrongly, found by walking along the decision boundary.

    HopSkipJumpAttack (Chen, Jordan and Wainwright, IEEE S&P 2020), untargeted: from noise that is wrong to the boundary
    by bisection; then in each step a direction from the decisions near the point, a jump along it, and back to the
    boundary. It asks for classes alone, so that gradient masking cannot stop it. Defaults are those of cleverhans 4.0,
    which the code released with RPC-Attention takes: 34,000 passes an image.

    Args:
        model, images, labels: see :func:`~lightning_tasks.robustness.fgsm`; the model needs no gradient.
        eps: the largest L2 norm of a change, above 0; what needs more is taken back.
        steps: jumps.
        initial_samples: decisions for the first direction; in step j, the root of j times as many.
        most_samples: decisions for a direction, at most.
        seed: of the noise.

    Returns:
        ``[B, C, H, W]``, in [0, 1]; an image that is wrong as it is, or for which no noise is wrong, stays as it is.

    Raises:
        ValueError: if ``eps``, the images, the labels or an option are out of range.
        TypeError: for other dtypes.

    Example:
        >>> import torch
        >>> from lightning_tasks.robustness import hop_skip_jump
        >>> model = lambda images: torch.stack([images.sum((1, 2, 3)) * 0 + 0.6, images.sum((1, 2, 3))], 1)
        >>> attacked = hop_skip_jump(model, torch.full((1, 1, 2, 2), 0.1), torch.tensor([0]), steps=5)
        >>> round((attacked - 0.1).norm().item(), 2)
        0.1
    """
    eps = check_radius(eps)
    check_batch(images, labels)
    check_options(steps=steps, initial_samples=initial_samples, most_samples=most_samples)
    generator = torch.Generator().manual_seed(seed)
    with held_still(model, gradients=False):
        images, labels = detached(images, labels)
        right = logits_of(model, images, labels).argmax(1) == labels
        start = _start(model, images, labels, right, generator)
        places = (right & (start != images).flatten(1).any(1)).nonzero().squeeze(1)
        clean, own = images[places], labels[places]

        def wrong(points: Tensor) -> Tensor:
            return logits_of(model, points.clamp(0, 1)).argmax(1) != own

        found = start.clone()
        if len(places):
            found[places] = _walk(wrong, clean, start[places], steps, initial_samples, most_samples, generator)
        return within(images, found, eps)


def _start(model: Model, images: Tensor, labels: Tensor, right: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise that is classified wrongly; the image itself where it is wrong, or no noise is."""
    start, open_ = images.clone(), right.clone()
    for _ in range(_STARTS):
        if not open_.any():
            break
        noise = torch.rand(images.shape, generator=generator, dtype=images.dtype).to(images)
        hit = open_ & (logits_of(model, noise).argmax(1) != labels)
        start[hit], open_ = noise[hit], open_ & ~hit
    return start


def _walk(
    wrong: Decide, images: Tensor, points: Tensor, steps: int, initial: int, most: int, generator: torch.Generator
) -> Tensor:
    size = images[0].numel()
    theta = size**-1.5
    before = _length(points - images)
    points = _to_boundary(wrong, images, points, theta)
    best, least = points, _length(points - images)
    for step in range(steps):
        delta = torch.full_like(before, _FIRST_DELTA) if step == 0 else size**0.5 * theta * before
        direction = _direction(wrong, points, delta, _samples(step, initial, most), generator)
        jump = _length(points - images) / (step + 1) ** 0.5
        landed = torch.zeros_like(jump, dtype=torch.bool)
        for _ in range(_HALVINGS):
            landed = wrong(points + _column(jump) * direction)
            if landed.all():
                break
            jump = torch.where(landed, jump, jump / 2)
        further = (points + _column(jump) * direction).clamp(0, 1)
        further = torch.where(_column(landed), further, points)
        before = _length(further - images)
        points = _to_boundary(wrong, images, further, theta)
        length = _length(points - images)
        best = torch.where(_column(length < least), points, best)
        least = torch.minimum(length, least)
    return best


def _direction(wrong: Decide, points: Tensor, delta: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """The gradient's direction, from which of ``samples`` points at distance ``delta`` are wrong; unit L2 norm."""
    weighted, plain = torch.zeros_like(points), torch.zeros_like(points)
    total = torch.zeros_like(delta)
    for _ in range(samples):
        noise = torch.randn(points.shape, generator=generator, dtype=points.dtype).to(points)
        near = (points + _column(delta / _length(noise)) * noise).clamp(0, 1)
        moved = (near - points) / _column(delta)
        sign = wrong(near).to(points.dtype) * 2 - 1
        weighted, plain, total = weighted + _column(sign) * moved, plain + moved, total + sign
    mean = total / samples
    one_side = mean.abs() == 1  # where all are wrong, or none is, there is no baseline to subtract
    found = weighted - _column(torch.where(one_side, torch.zeros_like(mean), mean)) * plain
    return found / _column(_length(found).clamp(min=torch.finfo(points.dtype).tiny))


def _to_boundary(wrong: Decide, images: Tensor, points: Tensor, theta: float) -> Tensor:
    """The wrong points nearest to the boundary, on the way from the images to wrong points."""
    low, high = torch.zeros_like(images[:, 0, 0, 0]), torch.ones_like(images[:, 0, 0, 0])
    for _ in range(math.ceil(math.log2(1 / theta))):
        middle = (low + high) / 2
        beyond = wrong(images + _column(middle) * (points - images))
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return images + _column(high) * (points - images)


def _samples(step: int, initial: int, most: int) -> int:
    return int(min(initial * (step + 1) ** 0.5, most))


def _length(change: Tensor) -> Tensor:
    return change.flatten(1).norm(dim=1)


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)
