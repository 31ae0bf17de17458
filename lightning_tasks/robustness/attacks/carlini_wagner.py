"""Carlini and Wagner's attack: the smallest change in the L2 norm, by Adam and a search for its weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
    GRADIENT,
    check_batch,
    check_options,
    check_radius,
    detached,
    finite_gradient,
    logits_of,
    losses_and_gradient,
    margins,
    register_attack,
    within,
)
from lightning_tasks.robustness.tested_model import Model, held_still

_INSIDE = 0.999999  # of the range, so that a value of 0 or 1 has a finite inverse of tanh
_LARGEST = 1e10


@register_attack(
    white_box=True, norm="L2", smallest=True, passes=lambda options: GRADIENT * options["steps"] * options["searches"]
)
def carlini_wagner(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = math.inf,
    steps: int = 1000,
    searches: int = 5,
    learning_rate: float = 5e-3,
    confidence: float = 0.0,
    initial_constant: float = 1e-2,
) -> Tensor:
    """The nearest images in the L2 norm that are classified wrongly, among all that a search passes through.

    The L2 attack of Carlini and Wagner (IEEE S&P 2017): x' = (tanh w + 1) / 2, and Adam minimizes over w
    ‖x' - x‖² + c max(margin + confidence, 0). For each image c is found by bisection, and multiplied by 10 until a
    first x' is wrong; each c starts from the image. Defaults are those of cleverhans 4.0, which the code released with
    RPC-Attention takes: there with eps as ``confidence``, at the model's own prediction, and on the normalized image
    clipped to [0, 1], which is another image; here on the image, at the true label.

    Args:
        model, images, labels: see :func:`~lightning_tasks.robustness.fgsm`.
        eps: the largest L2 norm of a change, above 0; what needs more is taken back.
        steps: of Adam for each c.
        searches: how many values of c.
        learning_rate: of Adam, in units of w.
        confidence: by how much another logit must exceed that of the label, at least 0.
        initial_constant: the first c.

    Returns:
        ``[B, C, H, W]``, in [0, 1]; an image that is wrong as it is, or is not made wrong, stays as it is.

    Raises:
        ValueError: if ``eps``, the images, the labels or an option are out of range, or the model gives no gradient.
        TypeError: for other dtypes.

    Example:
        >>> import torch
        >>> from lightning_tasks.robustness import carlini_wagner
        >>> model = lambda images: torch.stack([images.sum((1, 2, 3)), images.sum((1, 2, 3)) * 0 + 0.6], 1)
        >>> attacked = carlini_wagner(model, torch.full((1, 1, 2, 2), 0.2), torch.tensor([0]), steps=200)
        >>> round((attacked - 0.2).norm().item(), 2)
        0.1
    """
    eps = check_radius(eps)
    check_batch(images, labels)
    check_options(steps=steps, searches=searches, learning_rate=learning_rate)
    check_options(confidence=confidence, initial_constant=initial_constant)
    with held_still(model, gradients=True):
        images, labels = detached(images, labels)
        center = ((images * 2 - 1) * _INSIDE).atanh()
        constant = torch.full_like(images[:, 0, 0, 0], initial_constant)
        low, high = torch.zeros_like(constant), torch.full_like(constant, _LARGEST)
        best, length = images, torch.full_like(constant, math.inf)
        losses_and_gradient(model, images, labels)  # refuses a model without one
        with torch.no_grad():
            length[margins(logits_of(model, images, labels), labels) < 0] = 0.0

        points, squared, margin = images, constant, constant  # of the last call of the next

        def loss() -> Tensor:
            nonlocal points, squared, margin
            points = ((center + shift).tanh() + 1) / 2
            squared = (points - images).square().flatten(1).sum(1)
            margin = margins(logits_of(model, points, labels), labels)
            return (squared + constant * (margin + confidence).clamp(min=0)).sum()

        for _ in range(searches):
            found = torch.zeros_like(constant, dtype=torch.bool)
            shift = torch.zeros_like(images, requires_grad=True)
            optimizer = torch.optim.Adam([shift], lr=learning_rate)
            for _ in range(steps):
                shift.grad = finite_gradient(model, loss, shift)
                optimizer.step()
                wrong, norm = margin.detach() < -confidence, squared.detach().sqrt()
                found |= wrong
                better = wrong & (norm < length)
                best = torch.where(better.view(-1, 1, 1, 1), points.detach(), best)
                length = torch.where(better, norm, length)
            high = torch.where(found, torch.minimum(high, constant), high)
            low = torch.where(found, low, torch.maximum(low, constant))
            constant = torch.where(high < _LARGEST, (low + high) / 2, constant * 10)
        return within(images, best, eps)
