"""Data modules for the demonstration run, which differ in what a configuration says of them."""

import torch
from attnswap.datamodules import ResumableLoader
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tests.lightning_tasks.demo import DemoModule

SEEN: list[float] = []


class OtherData(LightningDataModule):
    def __init__(self, size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(torch.ones(self.size, 32))

    val_dataloader = test_dataloader = train_dataloader


class FurtherData(OtherData):
    """Another one."""


class ResumableData(OtherData):
    """Samples that differ, in a shuffled order."""

    def train_dataloader(self):
        return ResumableLoader(torch.arange(self.size, dtype=torch.float32)[:, None].expand(-1, 32), shuffle=True)


class ReadsSteps(DemoModule):
    """Asks for the number of steps before it trains, and notes the samples that it is given."""

    def training_step(self, batch, batch_idx):
        SEEN.append(float(batch[0, 0]))
        return super().training_step(batch / 8, batch_idx)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()
