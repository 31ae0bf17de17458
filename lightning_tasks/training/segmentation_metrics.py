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
    """Intersection over union of each class, ``[K]``, nan where a class is neither there nor predicted.

    Args:
        confusion: pixels ``[K, K]``, a row a true class.
    """
    return _iou(class_counts(confusion))


def class_accuracy(confusion: Tensor) -> Tensor:
    """Share of each class's pixels that are found, ``[K]``, nan where there are none."""
    return _accuracy(class_counts(confusion))


def scores(confusion: Tensor) -> dict[str, float]:
    """`miou` and `mean_accuracy`, over the classes for which they are defined, and `overall_accuracy`, of all pixels.

    The conventions of mmsegmentation's `IoUMetric`. (torchmetrics' macro accuracy would count a class that is
    predicted and not there as 0; its `MeanIoU` averages over images.) nan where no pixel counts.

    Args:
        confusion: pixels ``[K, K]``, a row a true class.
    """
    return dict(zip(SCORES, scores_of_counts(class_counts(confusion)).tolist(), strict=True))


def class_counts(confusion: Tensor) -> Tensor:
    """Pixels of each class, ``[..., 3, K]``: those that are found, that are there, and that are predicted."""
    return torch.stack([confusion.diagonal(dim1=-2, dim2=-1), confusion.sum(-1), confusion.sum(-2)], -2)


def scores_of_counts(counts: Tensor) -> Tensor:
    """The values of :func:`scores`, ``[..., 3]``, of what :func:`class_counts` counts."""
    hit, there, _ = to_float64(counts).unbind(-2)
    values = _iou(counts).nanmean(-1), _accuracy(counts).nanmean(-1), hit.sum(-1) / there.sum(-1)
    return torch.stack(values, -1)


def _iou(counts: Tensor) -> Tensor:
    hit, there, predicted = to_float64(counts).unbind(-2)
    return hit / (there + predicted - hit)


def _accuracy(counts: Tensor) -> Tensor:
    hit, there, _ = to_float64(counts).unbind(-2)
    return hit / there


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
