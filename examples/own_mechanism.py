"""Train your own mechanism with Lightning: a function with the arguments of F.scaled_dot_product_attention.

``python examples/own_mechanism.py`` trains a small ViT on the digits of scikit-learn, in seconds.
"""

import lightning as L
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnswap
from attnswap.callbacks import AttentionMonitor, SwapAttention


def cosine_attention(q, k, v, temperature=0.1, **options):
    q = F.normalize(q, dim=-1) * q.shape[-1] ** 0.5 / temperature
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v, **options)


class Digits(L.LightningModule):
    """A module of yours: nothing in it knows of attnswap."""

    def __init__(self):
        super().__init__()
        size = dict(img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=2, num_heads=4, num_classes=10)
        self.model = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", **size)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", (self.model(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


attnswap.check_mechanism(cosine_attention, only=["causality", "gradients"])  # without `only`: every check

L.seed_everything(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target))
train, validation = torch.utils.data.random_split(data, [0.8, 0.2])

swap = SwapAttention(cosine_attention, temperature=0.2)
monitor = AttentionMonitor(every_n_steps=10, statistics=["entropy"])
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(max_epochs=5, accelerator="cpu", callbacks=[swap, monitor], **quiet)
trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(validation, 360))
print(swap.report)
for name, value in sorted(trainer.callback_metrics.items()):
    print(f"{name:40} {value:.3f}")
