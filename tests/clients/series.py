"""Random walks, in the batches that pytorch-forecasting's TFT takes."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

METADATA = {
    "max_encoder_length": 8,
    "max_prediction_length": 4,
    "encoder_cont": 2,
    "encoder_cat": 0,
    "decoder_cont": 1,
    "decoder_cat": 0,
}


class Series(pl.LightningDataModule):
    """Eight walks; the model sees eight steps of two, and forecasts four of the first."""

    def train_dataloader(self):
        walks = torch.randn(8, 12, 2, generator=torch.Generator().manual_seed(0)).cumsum(1)
        none = torch.zeros(12, 0)
        parts = [
            {"encoder_cont": walk[:8], "encoder_cat": none[:8], "decoder_cont": walk[8:, 1:], "decoder_cat": none[8:]}
            for walk in walks
        ]
        return DataLoader([(part, walk[8:, :1]) for part, walk in zip(parts, walks, strict=True)], 4)

    def val_dataloader(self):
        return self.train_dataloader()
