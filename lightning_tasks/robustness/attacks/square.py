"""Square: random search with squares, an attack that asks for no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import (
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

# After so many of 10,000 queries, the share of the image that a square covers is halved (Andriushchenko et al.).
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_REDRAWS = 10


@register_attack(white_box=False, passes=lambda options: 1 + options["queries"])
def square(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    queries: int = 1000,
    initial_share: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """Images found by random search: vertical stripes of ±eps, then squares of ±eps, kept where the margin falls.

    The L-inf Square Attack (Andriushchenko et al., ECCV 2020), which gradient masking cannot stop. An image that is
    classified wrongly is left alone from then on. Squares are halved at the published points of ``queries``. AutoAttack
    asks 5,000 and halves them at those of 10,000, so that its squares stay larger.

    Args:
        model, images, labels, eps: see :func:`~lightning_tasks.robustness.fgsm`; the model needs no gradient.
        queries: forward passes per image, at most, after that of the clean image.
        initial_share: share of the image that the first square covers, in (0, 1].
        seed: of the search.

    Returns:
        ``[B, C, H, W]``, in [0, 1] and within ``eps``.

    Raises:
        ValueError: if ``eps``, the images, the labels or an option are out of range.
        TypeError: for other dtypes.
    """
    eps = check_eps(eps)
    check_batch(images, labels)
    check_options(queries=queries, initial_share=initial_share)
    generator = torch.Generator().manual_seed(seed)
    with held_still(model, gradients=False):
        images, labels = detached(images, labels)
        logits = logits_of(model, images, labels)
        best, margin, right = images.clone(), margins(logits, labels), logits.argmax(1) == labels
        for query in range(queries):
            active = right.nonzero().squeeze(1)  # [A]; a margin of 0 is right where the label is the lower class
            if len(active) == 0:
                break
            clean, points = images[active], best[active]
            ball = LinfBall.around(clean, eps)
            if query == 0:
                batch, channels, _, width = clean.shape
                trial = ball.project(clean + eps * random_signs((batch, channels, 1, width), generator, clean))
            else:
                share = square_share(initial_share, query - 1, queries)
                trial = _with_square(clean, points, ball, eps, share, generator)
            logits = logits_of(model, trial)
            trial_margin = margins(logits, labels[active])
            # The stripes are a start, whatever they do; a square must help.
            better = trial_margin < margin[active] if query else torch.ones_like(trial_margin, dtype=torch.bool)
            best[active] = torch.where(better.view(-1, 1, 1, 1), trial, points)
            margin[active] = torch.where(better, trial_margin, margin[active])
            right[active] = ~better | (logits.argmax(1) == labels[active])
        return best


def square_share(initial_share: float, query: int, queries: int) -> float:
    """The share of the image that the square of a query covers: halved at the published points of the schedule."""
    scaled = query * 10_000 // queries
    return initial_share / 2 ** sum(scaled > halving for halving in _HALVINGS)


def _with_square(
    clean: Tensor, points: Tensor, ball: LinfBall, eps: float, share: float, generator: torch.Generator
) -> Tensor:
    """The points with one square each at ±eps from the clean image, a sign a channel; drawn until it changes them."""
    batch, channels, height, width = clean.shape
    side = min(max(round((share * height * width) ** 0.5), 1), height, width)
    inside = _inside(height, side, batch, generator).unsqueeze(2) & _inside(width, side, batch, generator).unsqueeze(1)
    inside = inside.unsqueeze(1).to(clean.device)  # [A, 1, H, W]
    trial = points
    for _ in range(_REDRAWS):
        same = (trial == points).flatten(1).all(1).view(-1, 1, 1, 1)
        if not same.any():
            break
        signs = random_signs((batch, channels, 1, 1), generator, clean)
        trial = torch.where(same & inside, ball.project(clean + eps * signs), trial)
    return trial


def _inside(length: int, side: int, batch: int, generator: torch.Generator) -> Tensor:
    """Which places of an axis belong to the square of each image, ``[A, length]``."""
    first = torch.randint(0, length - side + 1, (batch, 1), generator=generator)
    places = torch.arange(length)
    return (places >= first) & (places < first + side)
