"""The attacks in the convention of the code that was released with RPC-Attention, under their own names.

There, eps is in units of the normalized image, nothing is clipped, and the attack moves away from the model's own
prediction (Teo and Nguyen, NeurIPS 2024, released code). Figures are not comparable with those of the other attacks: in
pixels, eps is multiplied by the standard deviation that the model divides by, about 1/4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    GRADIENT,
    LinfBall,
    check_batch,
    check_eps,
    check_options,
    detached,
    logits_of,
    losses_and_gradient,
    register_attack,
)
from lightning_tasks.robustness.attacks.gradient import ascent
from lightning_tasks.robustness.attacks.spsa import estimated_ascent, spsa_passes
from lightning_tasks.robustness.tested_model import Model, held_still

STEPS, STEP_SHARE = 20, 0.15


@register_attack(white_box=True, passes=lambda options: 1 + GRADIENT)
def released_fgsm(model: Model, images: Tensor, labels: Tensor, *, eps: float, std: Sequence[float]) -> Tensor:
    """One step of ``eps · std`` away from the model's own prediction, unclipped.

    Args:
        model, images: see :func:`~lightning_tasks.robustness.fgsm`.
        labels: not used but for their number: the model's prediction stands for them.
        eps: the largest change of a value of the normalized image, in [0, 1].
        std: what the model divides each channel by, ``[C]``.

    Returns:
        ``[B, C, H, W]``, possibly outside of [0, 1].

    Raises:
        ValueError: if ``eps``, ``std`` or the images are out of range, or the model gives no gradient.
        TypeError: for other dtypes.
    """
    eps = check_eps(eps)
    with convention(model, images, labels, std) as (clean, own, scale):
        radius = eps * scale
        _, gradient = losses_and_gradient(model, clean, own)
        return clean + radius * gradient.sign()


@register_attack(white_box=False, passes=lambda options: 1)
def released_noise(
    model: Model, images: Tensor, labels: Tensor, *, eps: float, std: Sequence[float], seed: int = 0
) -> Tensor:
    """A point drawn evenly within ``eps · std``, unclipped: no search, the same on every device.

    Args:
        model, images, labels, eps, std: see :func:`released_fgsm`, as the errors.
        seed: of the points.
    """
    eps = check_eps(eps)
    with convention(model, images, labels, std) as (clean, _, scale):
        return LinfBall.around(clean, eps * scale, clip=False).random(torch.Generator().manual_seed(seed))


@register_attack(white_box=True, passes=lambda options: 2 + GRADIENT * STEPS)
def released_pgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    std: Sequence[float],
    random_start: bool = True,
    seed: int = 0,
) -> Tensor:
    """The last of 20 steps of .15 ``eps · std`` away from the model's own prediction, unclipped.

    It starts anywhere in the ball, as the default of the cleverhans function is that the released code calls.

    Args:
        model, images, labels, eps, std: see :func:`released_fgsm`, as the errors.
        random_start: otherwise it starts at the image.
        seed: of the random start.
    """
    check_options(random_start=random_start)
    eps = check_eps(eps)
    with convention(model, images, labels, std) as (clean, own, scale):
        radius = eps * scale
        ball = LinfBall.around(clean, radius, clip=False)
        last = start = ball.random(torch.Generator().manual_seed(seed)) if random_start else clean
        for last, _ in ascent(model, start, own, ball, STEP_SHARE * radius, STEPS):  # noqa: B007
            pass
        return last


@register_attack(white_box=False, passes=lambda options: 1 + spsa_passes(options))
def released_spsa(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    std: Sequence[float],
    steps: int = 20,
    samples: int = 64,
    delta: float = 0.01,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> Tensor:
    """SPSA within ``eps · std``, away from the model's own prediction and unclipped; its settings are ours.

    The released code takes 10 steps of 256 passes from a random start, ``delta`` and ``learning_rate`` in units of the
    normalized image, and the last point.

    Arguments and errors: see :func:`released_fgsm` and :func:`~lightning_tasks.robustness.spsa`.
    """
    eps = check_eps(eps)
    with convention(model, images, labels, std) as (clean, own, scale):
        radius = eps * scale
        return estimated_ascent(
            model, clean, own, radius, False, steps=steps, samples=samples, delta=delta, rate=learning_rate, seed=seed
        )


@contextmanager
def convention(
    model: Model, images: Tensor, labels: Tensor, std: Sequence[float]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, the model's own predictions, and ``std`` a channel, ``[C, 1, 1]``; the model held still."""
    check_batch(images, labels)
    check_options(std=std)
    if len(std) != images.shape[1]:
        raise ValueError(f"std is {list(std)}: give {images.shape[1]} positive numbers, one per channel")
    with held_still(model, gradients=True):
        images, _ = detached(images, labels)
        with torch.no_grad():
            own = logits_of(model, images).argmax(1)
        yield images, own, torch.tensor(list(std), dtype=images.dtype, device=images.device).view(-1, 1, 1)
