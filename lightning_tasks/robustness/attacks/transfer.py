"""Transfer: images that were attacked on another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_tasks.robustness.attacks.common import NonFiniteLogitsError, check_batch, logits_of, register_attack
from lightning_tasks.robustness.attacks.gradient import pgd
from lightning_tasks.robustness.tested_model import Model, held_still


@register_attack(white_box=False, passes=lambda options: 2)  # and that of the attack on the twin
def transfer(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    source: Model,
    attack: Callable[..., Tensor] = pgd,
    **options: Any,
) -> Tensor:
    """Images that ``attack`` makes on ``source``, to be tried on ``model``, whose gradient is never asked.

    Args:
        model, images, labels, eps: see :func:`~lightning_tasks.robustness.fgsm`.
        source: the model to attack, with the same classes: the softmax twin, say.
        attack: an attack of this package.
        **options: for the attack.

    Returns:
        ``[B, C, H, W]``, in [0, 1] and within ``eps``.

    Raises:
        ValueError: if the two models differ in their number of classes, or the source's logits or gradient are not
            finite, of which no figure of the model tells; as the attack.
    """
    check_batch(images, labels)
    own = _classes(model, images)
    try:
        if (of_source := _classes(source, images)) != own:
            raise ValueError(f"the model has {own} classes and the source {of_source}: give a twin of the model")
        return attack(source, images, labels, eps=eps, **options)
    except NonFiniteLogitsError as error:
        if source is model:
            raise
        raise ValueError(f"the source of the transfer attack: {error}") from error


def _classes(model: Model, images: Tensor) -> int:
    """How many classes a model has, as it gives them for the first image; 0 where there is none."""
    if not len(images):
        return 0
    with held_still(model, gradients=False):
        return logits_of(model, images[:1].clone()).shape[1]
