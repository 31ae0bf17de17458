"""How well masks are predicted, from one confusion matrix over a whole split."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from attention_modules.precision import to_float64

SCORES = ("miou", "mean_accuracy", "overall_accuracy")


class SegmentationScores(MulticlassConfusionMatrix):
    """torchmetrics' confusion matrix of pixels; it sums over batches and processes, and leaves ignored pixels out."""

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        super().__init__(num_classes, ignore_index=ignore_index, validate_args=False)


def class_iou(confusion: Tensor) -> Tensor:
    """Intersection over union of each class, ``[..., K]``, nan where a class is neither there nor predicted.

    Args:
        confusion: pixels ``[..., K, K]``, a row a true class.
    """
    confusion = to_float64(confusion)
    hit = confusion.diagonal(dim1=-2, dim2=-1)
    return hit / (confusion.sum(-2) + confusion.sum(-1) - hit)


def class_accuracy(confusion: Tensor) -> Tensor:
    """Share of each class's pixels that are found, ``[..., K]``, nan where there are none."""
    confusion = to_float64(confusion)
    return confusion.diagonal(dim1=-2, dim2=-1) / confusion.sum(-1)


def scores(confusion: Tensor) -> dict[str, float]:
    """`miou` and `mean_accuracy`, over the classes for which they are defined, and `overall_accuracy`, of all pixels.

    The conventions of mmsegmentation's `IoUMetric`. (torchmetrics' macro accuracy would count a class that is
    predicted and not there as 0; its `MeanIoU` averages over images.) nan where no pixel counts.

    Args:
        confusion: pixels ``[K, K]``, a row a true class.
    """
    return dict(zip(SCORES, score_values(confusion).tolist(), strict=True))


def score_values(confusion: Tensor) -> Tensor:
    """The values of :func:`scores`, ``[..., 3]``, of matrices ``[..., K, K]``."""
    confusion = to_float64(confusion)
    values = (
        class_iou(confusion).nanmean(-1),
        class_accuracy(confusion).nanmean(-1),
        confusion.diagonal(dim1=-2, dim2=-1).sum(-1) / confusion.sum((-2, -1)),
    )
    return torch.stack(values, -1)


def write_class_iou(path: Path, names: Sequence[str], confusion: Tensor) -> None:
    """A CSV file with name, pixels, IoU and accuracy of each class; empty where one is not defined."""
    rows = zip(
        names,
        confusion.sum(1).tolist(),
        class_iou(confusion).tolist(),
        class_accuracy(confusion).tolist(),
        strict=True,
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["class", "name", "pixels", "iou", "accuracy"])
        for index, (name, pixels, *shares) in enumerate(rows):
            writer.writerow([index, name, pixels, *("" if math.isnan(share) else f"{share:.4f}" for share in shares)])
