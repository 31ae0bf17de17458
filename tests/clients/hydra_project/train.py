"""A project as lightning-hydra-template lays it out: all is a `_target_`, and nothing of attnswap is imported."""

import hydra
import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    """Any network, trained by any optimizer."""

    def __init__(self, net, optimizer):
        super().__init__()
        self.save_hyperparameters(ignore=["net"], logger=False)
        self.net = net

    def forward(self, images):
        return self.net(images)

    def step(self, batch, name):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log(f"{name}/loss", loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return self.hparams.optimizer(params=self.parameters())


class Noise(pl.LightningDataModule):
    """Images of noise."""

    def __init__(self, size: int):
        super().__init__()
        images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(0))
        self.images = TensorDataset(images, torch.arange(8) % 2)

    def train_dataloader(self):
        return DataLoader(self.images, 4)

    def val_dataloader(self):
        return DataLoader(self.images, 4)


def train(config: DictConfig) -> None:
    """One run, by the configuration alone."""
    pl.seed_everything(config.seed)
    callbacks = [instantiate(each) for each in config.callbacks.values()]
    data, model = instantiate(config.data), instantiate(config.model)
    trainer = instantiate(config.trainer, callbacks=callbacks, logger=instantiate(config.logger))
    trainer.fit(model, data)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    """The program."""
    train(config)


if __name__ == "__main__":
    main()
