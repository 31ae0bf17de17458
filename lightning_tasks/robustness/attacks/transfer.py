"""Transfer: images that were attacked on another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_tasks.robustness.attacks.common import check_batch, logits_of, register_attack
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
        ValueError: if the two models differ in their number of classes; as the attack.
    """
    check_batch(images, labels)
    if len(images):
        classes = []
        for each in (model, source):
            with held_still(each, gradients=False):
                classes.append(logits_of(each, images[:1].clone()).shape[1])
        if classes[0] != classes[1]:
            raise ValueError(
                f"the model has {classes[0]} classes and the source {classes[1]}: give a twin of the model"
            )
    return attack(source, images, labels, eps=eps, **options)
