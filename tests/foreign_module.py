"""A Lightning module that knows nothing of attnswap."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class EncoderModule(pl.LightningModule):
    """Two encoder layers that learn to give their input back."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return (self(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
