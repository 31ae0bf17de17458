"""A module and data of one's own, which hold more than Lightning's checkpoints do."""

import random

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from attnswap.datamodules import ResumableLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset


class OwnModule(pl.LightningModule):
    """Regression of an input on itself; `kind` says what else it does."""

    def __init__(self, kind: str = "plain"):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)
        self.losses, self.steps, self.rate = [], 0, 0.1
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("running", torch.zeros(()), persistent=False)
        self.automatic_optimization = kind != "adds to gradients"

    def training_step(self, batch, batch_index):
        loss = (self.layer(batch) - batch).square().mean()
        if self.kind == "a count":
            self.steps += 1
            loss = loss * self.steps
        elif self.kind == "a buffer":
            self.running += loss.detach()
            loss = loss * self.running
        elif self.kind == "a list":
            self.losses.append(loss.detach())
        elif self.kind == "a metric":
            self.metric.update(loss.detach())
        elif self.kind == "adds to gradients":
            self.manual_backward(loss)
            if batch_index % 4 == 3:
                self.optimizers().step()
                self.optimizers().zero_grad()
        self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self):
        if self.kind == "a list":
            self.log("train/mean", torch.stack(self.losses).mean())
            self.losses.clear()
        elif self.kind == "a metric":
            self.log("train/mean", self.metric.compute())
            self.metric.reset()

    def validation_step(self, batch, batch_index):
        self.log("val/loss", (self.layer(batch) - batch).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        if not self.kind.startswith("plateau"):
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        monitor = "val/loss" if self.kind == "plateau by epochs" else "train/loss"
        interval = self.kind.rpartition(" ")[2].removesuffix("s")
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": monitor, "interval": interval},
        }


class LateModule(OwnModule):
    """Moves its weights once its optimizer has, as those that follow others do."""

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)


class Drawn(Dataset):
    """Numbers to which what `by` draws is added."""

    def __init__(self, by: str = ""):
        self.by, self.own = by, np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draws = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(()).item(),
            "own": self.own.random,
        }
        return torch.full((4,), index / 24) + (draws[self.by]() if self.by else 0.0)


class OwnData(pl.LightningDataModule):
    """Batches of four."""

    def __init__(self, by: str = "", workers: int = 0):
        super().__init__()
        self.by, self.workers = by, workers

    def train_dataloader(self):
        options = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return ResumableLoader(Drawn(self.by), 4, shuffle=True, **options)

    def val_dataloader(self):
        return DataLoader(Drawn(), 8)


class Counts(pl.Callback):
    """Logs what it has counted, and saves nothing."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.count += 1
        pl_module.log("count", float(self.count))
