"""SPSA: ascent along a gradient that is estimated from the model's outputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    Best,
    LinfBall,
    check_batch,
    check_eps,
    check_options,
    detached,
    logits_of,
    margins,
    random_signs,
    register_attack,
)
from lightning_tasks.robustness.tested_model import Model, held_still


def spsa_passes(options: Mapping[str, Any]) -> float:
    """Cost in forward passes."""
    return float(1 + options["steps"] * (options["samples"] + 1))


@register_attack(white_box=False, passes=spsa_passes)
def spsa(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    steps: int = 20,
    samples: int = 64,
    delta: float = 0.01,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> Tensor:
    """Images whose margin is lowest among those that Adam passes through, on gradients estimated without any backward.

    Simultaneous perturbation stochastic approximation (Uesato et al., ICML 2018): a gradient is the mean of
    (f(x + delta v) - f(x - delta v)) / (2 delta) v over random signs v, f the logit margin. Their study takes 2,048
    samples and 100 steps; the defaults here are smaller, for use as a routine check.

    Args:
        model, images, labels, eps: see :func:`~lightning_tasks.robustness.fgsm`; the model needs no gradient.
        steps: steps of Adam.
        samples: forward passes for one estimate, an even number.
        delta: how far the samples are from the point; they are clipped to [0, 1].
        learning_rate: of Adam, in units of the image.
        seed: of the random signs.

    Returns:
        ``[B, C, H, W]``, in [0, 1] and within ``eps``.

    Raises:
        ValueError: if ``eps``, the images, the labels or an option are out of range.
        TypeError: for other dtypes.
    """
    eps = check_eps(eps)
    check_batch(images, labels)
    return estimated_ascent(
        model, images, labels, eps, True, steps=steps, samples=samples, delta=delta, rate=learning_rate, seed=seed
    )


def estimated_ascent(
    model: Model,
    images: Tensor,
    labels: Tensor,
    radius: float | Tensor,
    clip: bool,
    *,
    steps: int,
    samples: int,
    delta: float,
    rate: float,
    seed: int,
) -> Tensor:
    """SPSA in the ball of ``radius`` (a number, or ``[C, 1, 1]``), its points and samples in [0, 1] where ``clip``."""
    check_options(steps=steps, samples=samples, delta=delta, learning_rate=rate)
    generator = torch.Generator().manual_seed(seed)
    with held_still(model, gradients=False):
        images, labels = detached(images, labels)
        ball = LinfBall.around(images, radius, clip)
        points = images.clone()
        optimizer = torch.optim.Adam([points], lr=rate)
        best = Best(images, -margins(logits_of(model, images, labels), labels))

        def margin_near(shift: Tensor) -> Tensor:
            near = points + shift
            return margins(logits_of(model, near.clamp(0, 1) if clip else near), labels)

        for _ in range(steps):
            estimate = torch.zeros_like(points)
            for _ in range(samples // 2):
                signs = random_signs(tuple(points.shape), generator, points)
                slope = (margin_near(delta * signs) - margin_near(-delta * signs)) / (2 * delta)
                estimate += slope.to(points.dtype).view(-1, 1, 1, 1) * signs
            points.grad = estimate / (samples // 2)
            optimizer.step()
            points.copy_(ball.project(points))
            best.update(points, -margins(logits_of(model, points), labels))
        return best.points
