"""How large the gradient for the input is: near zero, a white-box attack sees nothing."""

from __future__ import annotations

from torch import Tensor

from lightning_tasks.robustness.linf import Model, check_batch, detached, held_still, losses_and_gradient


def input_gradient_norms(model: Model, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """L1 and L2 norm of the gradient of each image's cross-entropy for that image, each ``[B]``, in nats a unit.

    Args:
        model, images, labels: see :func:`~lightning_tasks.robustness.fgsm`.

    Raises:
        ValueError, TypeError: see :func:`~lightning_tasks.robustness.fgsm`.
    """
    check_batch(images, labels)
    with held_still(model, gradients=True):
        _, gradient = losses_and_gradient(model, *detached(images, labels))
        return gradient.flatten(1).norm(1, dim=1), gradient.flatten(1).norm(2, dim=1)
