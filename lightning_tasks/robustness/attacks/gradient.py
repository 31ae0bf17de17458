"""PGD: steps along the sign of the gradient, each projected back into the ball."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    GRADIENT,
    Best,
    LinfBall,
    check_batch,
    check_eps,
    check_options,
    cross_entropies,
    detached,
    logits_of,
    losses_and_gradient,
    register_attack,
)
from lightning_tasks.robustness.tested_model import Model, held_still


@register_attack(
    white_box=True, passes=lambda options: GRADIENT + 1 + options["restarts"] * (GRADIENT * options["steps"] + 1)
)
def pgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    seed: int = 0,
) -> Tensor:
    """The images of the highest cross-entropy among all that projected gradient ascent passes through.

    Projected gradient descent (Madry et al., ICLR 2018) in the L-inf ball, on images in [0, 1]. The best is kept for
    each image, over all steps and restarts; the image itself and the point of :func:`~lightning_tasks.robustness.fgsm`
    take part, so that the loss is never below theirs.

    Args:
        model, images, labels, eps: see :func:`~lightning_tasks.robustness.fgsm`.
        steps: gradient steps of a restart.
        step_size: length of a step; 2.5 eps / steps where None.
        restarts: how often to start.
        random_start: start anywhere in the ball, rather than at the image (where one restart is enough).
        seed: of the random starts.

    Returns:
        ``[B, C, H, W]``, in [0, 1] and within ``eps``.

    Raises:
        ValueError: as :func:`~lightning_tasks.robustness.fgsm`; for an option out of its limits.
    """
    eps = check_eps(eps)
    check_batch(images, labels, masks=True)
    check_options(steps=steps, step_size=step_size, restarts=restarts, random_start=random_start)
    step_size = 2.5 * eps / steps if step_size is None else step_size
    generator = torch.Generator().manual_seed(seed)
    with held_still(model, gradients=True):
        images, labels = detached(images, labels)
        ball = LinfBall.around(images, eps)
        losses, gradient = losses_and_gradient(model, images, labels)
        best = Best(images, losses)
        best.update(*_with_losses(model, ball.project(images + eps * gradient.sign()), labels))
        for _ in range(restarts):
            start = ball.random(generator) if random_start else images
            for points, losses in ascent(model, start, labels, ball, step_size, steps):
                best.update(points, losses)
        return best.points


def ascent(
    model: Model, points: Tensor, labels: Tensor, ball: LinfBall, step_size: float | Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of the ``steps + 1`` points of projected gradient ascent, ``[B, C, H, W]``, with its losses ``[B]``."""
    for _ in range(steps):
        losses, gradient = losses_and_gradient(model, points, labels)
        yield points, losses
        points = ball.project(points + step_size * gradient.sign())
    yield _with_losses(model, points, labels)


@torch.no_grad()
def _with_losses(model: Model, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return points, cross_entropies(logits_of(model, points, labels), labels)


@register_attack(white_box=True, passes=lambda options: GRADIENT)
def fgsm(model: Model, images: Tensor, labels: Tensor, *, eps: float) -> Tensor:
    """Images moved by ``eps`` along the sign of the gradient of the cross-entropy, and clipped to [0, 1].

    The fast gradient sign method (Goodfellow et al., ICLR 2015). It works under ``no_grad`` and in inference mode, and
    leaves the model as it was.

    Args:
        model: images ``[B, C, H, W]`` in [0, 1] to logits ``[B, classes]``, or of each pixel ``[B, classes, H, W]``; it
            runs in eval mode.
        images: ``[B, C, H, W]``, float32 or float64.
        labels: the true classes ``[B]``, int64, or masks ``[B, H, W]``, where -100 marks pixels that do not count: the
            loss of an image is then the mean over the others.
        eps: the largest change of a value, in [0, 1].

    Returns:
        ``[B, C, H, W]``, in [0, 1].

    Raises:
        ValueError: if ``eps``, the images or the labels are out of range, or the model gives no gradient.
        TypeError: for other dtypes.
    """
    eps = check_eps(eps)
    check_batch(images, labels, masks=True)
    with held_still(model, gradients=True):
        images, labels = detached(images, labels)
        _, gradient = losses_and_gradient(model, images, labels)
        return LinfBall.around(images, eps).project(images + eps * gradient.sign())


def input_gradient_norms(model: Model, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """L1 and L2 norm of the gradient of each image's cross-entropy for that image, each ``[B]``, in nats per unit.

    Args:
        model, images, labels: see :func:`~lightning_tasks.robustness.fgsm`.

    Raises:
        ValueError, TypeError: see :func:`~lightning_tasks.robustness.fgsm`.
    """
    check_batch(images, labels, masks=True)
    with held_still(model, gradients=True):
        _, gradient = losses_and_gradient(model, *detached(images, labels))
        return gradient.flatten(1).norm(1, dim=1), gradient.flatten(1).norm(2, dim=1)
