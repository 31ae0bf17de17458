"""A small module whose network is called as a whole, and its training with Heal."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks.callbacks import SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit

CLASSES, TOKENS, DIM = 5, 6, 8
LAYERS = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, CLASSES)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Task(TinyLM):
    """Classifies; in float64 where asked."""

    def __init__(self, lr: float = 0.05, dtype: torch.dtype = torch.float32):
        super().__init__(lr)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = Classifier().to(dtype)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])


def data(count=4, batch_size=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count * batch_size, TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(CLASSES, (count * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, labels), batch_size=batch_size)


def heal(callback, mechanism="symmetric", module=None, options=None, loader=None, **trainer_options):
    """The module after a fit with the mechanism and the callbacks."""
    module = module or Task()
    torch.manual_seed(1)  # of a mechanism's own Parameters
    swap = [] if mechanism is None else [SwapAttention(mechanism, options or {})]
    loader = loader or data(dtype=next(module.parameters()).dtype)
    callbacks = callback if isinstance(callback, list) else [callback]
    trainer = fit(module, [*swap, *callbacks], loader, loader, **trainer_options)
    return module, trainer
