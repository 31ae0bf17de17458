"""Scores of masks: against torchmetrics, by hand, over a whole split, and without the pixels that do not count."""

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_jaccard_index

from lightning_tasks.training.segmentation_metrics import (
    SegmentationScores,
    class_accuracy,
    class_iou,
    scores,
    write_class_iou,
)


def masks(count=6, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, classes, (count, 9, 7), generator=generator)
    noise = torch.randint(0, classes, truth.shape, generator=generator)
    predicted = noise.where(torch.rand(truth.shape, generator=generator) < 0.4, truth)
    truth[torch.rand(truth.shape, generator=generator) < 0.2] = 255
    return predicted, truth


def confusion(predicted, truth, classes=4, batch=2):
    metric = SegmentationScores(classes, 255)
    for first in range(0, len(truth), batch):
        metric.update(predicted[first : first + batch], truth[first : first + batch])
    return metric.compute()


def test_scores_are_those_of_torchmetrics_over_the_whole_split():
    predicted, truth = masks()
    found = scores(confusion(predicted, truth))
    options = {"num_classes": 4, "ignore_index": 255}
    assert found["miou"] == pytest.approx(multiclass_jaccard_index(predicted, truth, **options).item())
    assert found["mean_accuracy"] == pytest.approx(multiclass_accuracy(predicted, truth, **options).item())
    overall = multiclass_accuracy(predicted, truth, average="micro", **options).item()
    assert found["overall_accuracy"] == pytest.approx(overall)
    batches = [scores(confusion(predicted[i : i + 1], truth[i : i + 1]))["miou"] for i in range(6)]
    assert found["miou"] != pytest.approx(sum(batches) / 6, abs=1e-4)


def test_by_hand():
    truth = torch.tensor([[[0, 0, 0, 1, 255, 255]]])
    predicted = torch.tensor([[[0, 0, 2, 1, 1, 3]]])
    table = confusion(predicted, truth)
    assert table.sum() == 4
    assert class_iou(table)[:3].tolist() == pytest.approx([2 / 3, 1.0, 0.0])
    assert math.isnan(class_iou(table)[3])  # predicted only where nothing counts
    assert class_accuracy(table)[:2].tolist() == pytest.approx([2 / 3, 1.0])
    found = scores(table)
    assert found["miou"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found["mean_accuracy"] == pytest.approx((2 / 3 + 1) / 2)  # class 2 has no pixel to be found
    assert found["overall_accuracy"] == pytest.approx(3 / 4)


def test_a_split_where_nothing_counts_has_no_score():
    nothing = torch.full((1, 2, 2), 255)
    assert all(math.isnan(value) for value in scores(confusion(nothing * 0, nothing)).values())


def test_the_table_of_the_classes(tmp_path):
    table = confusion(torch.tensor([[[0, 1]]]), torch.tensor([[[0, 0]]]))
    write_class_iou(tmp_path / "a.csv", list("abcd"), table)
    lines = (tmp_path / "a.csv").read_text().split()
    assert lines == ["class,name,pixels,iou,accuracy", "0,a,2,0.5000,0.5000", "1,b,0,0.0000,", "2,c,0,,", "3,d,0,,"]
