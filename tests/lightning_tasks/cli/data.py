"""Data modules for the demonstration run, which differ in what a configuration says of them."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class OtherData(LightningDataModule):
    def __init__(self, size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(torch.ones(self.size, 32))

    val_dataloader = test_dataloader = train_dataloader


class FurtherData(OtherData):
    """Another one."""
