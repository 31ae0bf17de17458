"""A data module and a data set as torchgeo has them, of images that are made up."""

import torch
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.datasets import NonGeoDataset


class Fields(NonGeoDataset):
    """Noise of 13 bands whose mean tells the class."""

    def __init__(self, split: str = "train", count: int = 4) -> None:
        generator = torch.Generator().manual_seed({"train": 0, "val": 1, "test": 2}[split])
        self.labels = torch.arange(count) % 2
        self.images = (
            255 * torch.rand(count, 13, 160, 160, generator=generator) * (1 + self.labels[:, None, None, None])
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


class FieldsDataModule(NonGeoDataModule):
    """Batches of :class:`Fields`, with torchgeo's own normalization."""

    def __init__(self, batch_size: int = 2, num_workers: int = 0) -> None:
        super().__init__(Fields, batch_size, num_workers)
