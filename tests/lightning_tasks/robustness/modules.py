"""A LightningModule that classifies images in [0, 1], and images for it, as a user would write them."""

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning_tasks.robustness.models import CLASSES, vit


class TinyClassifier(pl.LightningModule):
    def __init__(self, attention: str | None = None, iterations: int | None = None, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        options = {} if iterations is None else {"iterations": iterations, "lam": 0.5}
        with torch.random.fork_rng():
            self.model = vit(attention, seed, **options)

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test/loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def random_images(count, size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    noise = torch.rand(count, 3, size, size, generator=generator)
    return 0.7 * noise + 0.3 * (labels / CLASSES).view(-1, 1, 1, 1), labels


class TinyImages(pl.LightningDataModule):
    def __init__(self, size: int = 12, count: int = 24, batch_size: int = 10, seed: int = 1):
        super().__init__()
        self.size, self.count, self.batch_size, self.seed = size, count, batch_size, seed

    def train_dataloader(self):
        return DataLoader(TensorDataset(*random_images(self.count, self.size, 0)), batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(TensorDataset(*random_images(self.count, self.size, self.seed)), batch_size=self.batch_size)
