"""A module of `pytorch_lightning` around a Hugging Face ViT with LoRA, which knows nothing of attnswap."""

import pytorch_lightning as pl
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification


class ViTWithLoRA(pl.LightningModule):
    """Adapters on the projections ``adapted`` train, and the head."""

    def __init__(self, adapted: list[str], lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        config = ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            num_labels=2,
        )
        lora = LoraConfig(r=2, target_modules=adapted, lora_dropout=0.1, modules_to_save=["classifier"])
        self.model = get_peft_model(ViTForImageClassification(config), lora)

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def step(self, batch, name):
        loss = functional.cross_entropy(self.model(pixel_values=batch[0]).logits, batch[1])
        self.log(f"{name}/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], self.hparams.lr)


class Noise(pl.LightningDataModule):
    """Images of noise."""

    def train_dataloader(self):
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, torch.arange(8) % 2), 4)

    def val_dataloader(self):
        return self.train_dataloader()
