"""Means keep NaN: of a task's metrics, of what is logged as a tensor, and with the weights that torchmetrics drops."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.aggregation import BaseAggregator

from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask
from lightning_tasks.training.mean import WeightedMean
from tests.lightning_tasks.language_data import SMALL, TOKENS, VOCAB, trainer

VIT = {"img_size": 8, "patch_size": 4, "in_chans": 3, "embed_dim": 8, "depth": 1, "num_heads": 2}
SEGMENTER = {"patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
MASKS = {"backbone": "deit_tiny_patch16_224", "img_size": 8, "backbone_options": SEGMENTER}


def built(task):
    task.configure_model()
    return task


TASKS = {
    "language": lambda: built(LanguageModelingTask(SMALL, vocab_size=VOCAB)),
    "images": lambda: built(ImageClassificationTask("vit_tiny_patch16_224", num_classes=6, model_options=VIT)),
    "masks": lambda: built(SegmentationTask(MASKS, num_classes=3)),
}


def samples(kind):
    """Three samples, two batches of at most two."""
    if kind == "language":
        tokens = torch.arange(3 * TOKENS).reshape(3, TOKENS) % VOCAB
        return tokens, tokens
    images = torch.rand(3, 3, 8, 8)
    return images, torch.zeros(3, dtype=torch.int64) if kind == "images" else torch.zeros(3, 8, 8, dtype=torch.int64)


def test_weights_count_and_nan_and_infinity_stay():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), torch.tensor(3))
    mean.update(5.0)
    mean.update(torch.tensor([2.0, 4.0]), 2)
    assert mean.compute() == (3 + 5 + 2 * 2 + 2 * 4) / (3 + 1 + 2 + 2)
    mean.update(math.inf)
    assert mean.compute() == math.inf
    mean.update(torch.tensor(math.nan), 1)
    assert math.isnan(mean.compute())


def test_why_torchmetrics_own_disable_is_not_enough():
    """Where this fails torchmetrics has mended it, and WeightedMean is `MeanMetric(nan_strategy="disable")`."""
    mean = MeanMetric(nan_strategy="disable")
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(5.0), 1)
    assert mean.compute() == 3.0  # the weighted mean is 2


def test_it_is_the_mean_of_torchmetrics_for_finite_values():
    values, weights = torch.randn(20, dtype=torch.float64), torch.randint(0, 9, (20,))
    ours, theirs = WeightedMean(), MeanMetric()
    for value, weight in zip(values, weights, strict=True):
        ours.update(value, weight)
        theirs.update(value, weight)
    assert torch.equal(ours.compute(), theirs.compute())


@pytest.mark.parametrize("kind", TASKS)
def test_no_metric_of_a_task_drops_nan(kind):
    metrics = [part for part in TASKS[kind]().modules() if isinstance(part, Metric)]
    means = [metric for metric in metrics if isinstance(metric, BaseAggregator)]
    assert means, "a task without a mean"
    for metric in means:
        metric.update(torch.tensor(1.0))
        metric.update(torch.tensor(math.nan))
        assert math.isnan(metric.compute()), metric


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("kind", TASKS)
def test_one_nan_batch_makes_the_loss_of_the_split_nan(kind, stage, tmp_path, monkeypatch):
    task = TASKS[kind]()
    step = "validation_step" if stage == "validate" else "test_step"
    evaluate = getattr(task, step)

    def poisoned(batch, batch_idx):
        if batch_idx == 1:
            for parameter in task.parameters():
                parameter.data.fill_(math.nan)
        return evaluate(batch, batch_idx)

    monkeypatch.setattr(task, step, poisoned)
    loader = DataLoader(TensorDataset(*samples(kind)), batch_size=2)
    logged = getattr(trainer(tmp_path), stage)(task, loader, verbose=False)[0]
    assert math.isnan(logged[f"{'val' if stage == 'validate' else 'test'}/loss"])


class LogsNaN(LightningModule):
    """Logs as its loss a plain number that is given for each epoch and batch."""

    def __init__(self, values):
        super().__init__()
        self.weight, self.values = torch.nn.Parameter(torch.ones(())), values

    def training_step(self, batch, batch_idx):
        return self.weight.square()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.values[self.current_epoch][batch_idx], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.zeros(1))

    def val_dataloader(self):
        return DataLoader(torch.zeros(2))


def test_lightnings_own_mean_keeps_nan(tmp_path):
    logged = trainer(tmp_path).validate(LogsNaN([[1.0, math.nan]]), verbose=False)[0]
    assert math.isnan(logged["val/loss"])


def test_a_nan_epoch_is_not_the_best_and_stops_early(tmp_path):
    values = [[3.0, 3.0], [2.0, 2.0], [1.0, math.nan], [2.5, 2.5]]
    best = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{epoch}")
    trainer(tmp_path, max_epochs=4, num_sanity_val_steps=0, callbacks=[best]).fit(LogsNaN(values))
    assert best.best_model_score == 2.0
    assert best.best_model_path.endswith("epoch=1.ckpt")
    stop = EarlyStopping("val/loss", patience=9)
    run = trainer(tmp_path, max_epochs=4, num_sanity_val_steps=0, callbacks=[stop], enable_checkpointing=False)
    run.fit(LogsNaN(values))
    assert run.current_epoch == 3  # by its check_finite, in the epoch of the NaN
    assert stop.stopped_epoch == 2


def test_a_value_of_weight_zero_does_not_count_even_where_it_is_nan() -> None:
    mean = WeightedMean()
    mean.update(torch.tensor(float("nan")), 0)
    mean.update(torch.tensor([2.0, float("nan")]), torch.tensor([3, 0]))
    assert mean.compute() == 2.0
