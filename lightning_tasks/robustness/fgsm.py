"""FGSM: one step along the sign of the gradient."""

from __future__ import annotations

from torch import Tensor

from lightning_tasks.robustness.linf import (
    LinfBall,
    Model,
    check_batch,
    check_eps,
    detached,
    held_still,
    losses_and_gradient,
)


def fgsm(model: Model, images: Tensor, labels: Tensor, *, eps: float) -> Tensor:
    """Images moved by ``eps`` along the sign of the gradient of the cross-entropy, and clipped to [0, 1].

    The fast gradient sign method (Goodfellow et al., ICLR 2015). It works under ``no_grad`` and in inference mode, and
    leaves the model as it was.

    Args:
        model: images ``[B, C, H, W]`` in [0, 1] to logits ``[B, classes]``; it runs in eval mode.
        images: ``[B, C, H, W]``, float32 or float64.
        labels: the true classes ``[B]``, int64.
        eps: the largest change of a value, in [0, 1].

    Returns:
        ``[B, C, H, W]``, in [0, 1].

    Raises:
        ValueError: if ``eps``, the images or the labels are out of range, or the model gives no gradient.
        TypeError: for other dtypes.
    """
    eps = check_eps(eps)
    check_batch(images, labels)
    with held_still(model, gradients=True):
        images, labels = detached(images, labels)
        _, gradient = losses_and_gradient(model, images, labels)
        return LinfBall.around(images, eps).project(images + eps * gradient.sign())
