"""How well a classifier's confidence tells images of its classes from others."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_specificity_at_sensitivity,
)

from attention_modules.precision import to_float64

OOD_METRICS = ("auroc", "aupr", "fpr95")


def anomaly_scores(logits: Tensor) -> Tensor:
    """1 - the largest softmax probability of each row of ``[N, classes]``, ``[N]`` in float64."""
    # 1 - max p = Σ of the others: sure predictions, which 1 - p rounds to 0, keep their order.
    probabilities = to_float64(logits).softmax(1)
    highest = probabilities.argmax(1, keepdim=True)
    return probabilities.scatter(1, highest, 0.0).sum(1)


def detection_metrics(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, AUPR and FPR95 of anomaly scores; the images from outside are the positive class, as for ImageNet-O.

    AUPR depends on the share of outside images, which is its value at chance. FPR95 is the share of inside images
    that are taken for outside where at least 95% of the outside ones are found. Definitions of Hendrycks and Gimpel
    (ICLR 2017) and Hendrycks et al. (CVPR 2021), computed by torchmetrics.

    Args:
        inside: scores ``[N]`` of images of the classes, each in [0, 1], higher for what seems from outside.
        outside: scores ``[M]`` of the others.

    Raises:
        ValueError: if one of them is empty, or a score is not in [0, 1].
    """
    if not len(inside) or not len(outside):
        raise ValueError(f"{len(inside)} images inside and {len(outside)} outside: at least one of each is needed")
    inside, outside = to_float64(inside), to_float64(outside)
    scores = torch.cat([inside, outside])
    if not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError(f"scores are in [{scores.min():g}, {scores.max():g}]: give them in [0, 1]")
    target = torch.cat([torch.zeros_like(inside, dtype=torch.int64), torch.ones_like(outside, dtype=torch.int64)])
    specificity, _ = binary_specificity_at_sensitivity(scores, target, min_sensitivity=0.95)
    return {
        "auroc": float(binary_auroc(scores, target)),
        "aupr": float(binary_average_precision(scores, target)),
        "fpr95": 1 - float(specificity),
    }
