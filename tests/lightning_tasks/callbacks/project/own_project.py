"""A small project of somebody else's: its own module, its own data, nothing of attnswap."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Letters(pl.LightningDataModule):
    """Sequences of letters, and whether they have more of the first letter than of the second."""

    def __init__(self, length: int = 6, batch_size: int = 4) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def _loader(self, seed: int) -> DataLoader:
        letters = torch.randint(5, (3 * self.batch_size, self.length), generator=torch.Generator().manual_seed(seed))
        more = (letters == 0).sum(1) > (letters == 1).sum(1)
        return DataLoader(TensorDataset(letters, more.long()), self.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(1)

    def val_dataloader(self) -> DataLoader:
        return self._loader(2)

    def test_dataloader(self) -> DataLoader:
        return self._loader(3)


class Reader(pl.LightningModule):
    """A transformer over letters; its optimizer is the command line's."""

    def __init__(self, dim: int = 8, num_layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(5, dim), nn.Linear(dim, 2)
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(letters)).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/loss", functional.cross_entropy(self(batch[0]), batch[1]))
