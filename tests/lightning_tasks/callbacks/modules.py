"""Small LightningModules that know nothing of this project, and their data."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, TOKENS, DIM, HEADS = 13, 6, 8, 2


def batches(count=5, batch_size=2, vocabulary=VOCABULARY):
    """A fixed loader of next-token batches."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocabulary, (count * batch_size, TOKENS + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size)


def network(num_layers=2):
    """A causal language model of PyTorch's own layers, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        # A deeper copy of one layer has equal weights in all of them: make them differ.
        for parameter in encoder.parameters():
            nn.init.normal_(parameter, std=0.3)
        parts = {"embed": nn.Embedding(VOCABULARY, DIM), "encoder": encoder, "head": nn.Linear(DIM, VOCABULARY)}
        return nn.ModuleDict(parts)


class TinyLM(pl.LightningModule):
    """Builds in ``__init__``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.net = network()

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.net["head"](self.net["encoder"](self.net["embed"](tokens), mask=mask))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, fused=self.hparams.fused)


class BuildsInSetup(TinyLM):
    """Builds in ``setup``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        del self.net

    def setup(self, stage):
        if not hasattr(self, "net"):
            self.net = network()


class BuildsInConfigureModel(TinyLM):
    """Builds in ``configure_model``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = network()


class TwoOptimizers(TinyLM):
    """Manual optimization; one optimizer holds the first layer's attention, the other the second's."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = list(self.net["encoder"].layers[0].parameters())
        held = {id(parameter) for parameter in first}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in held]
        return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.SGD(rest, lr=0.05)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def stepping(kind, when):
    """A module that takes the steps of some batches, and leaves out those of others after their backward pass."""

    class Steps(kind):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            if when(batch_idx):
                optimizer.step()

    return Steps


def keeping(kind, steps):
    """A module that gathers the gradients of so many batches itself, and takes a step behind them."""

    class Keeps(stepping(kind, lambda batch: (batch + 1) % steps == 0)):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % steps == 0:
                optimizer.zero_grad()

    return Keeps


def fit(module, callbacks=(), loader=None, val_loader=None, **trainer_options):
    """Train on the CPU with nothing printed or written; returns the trainer."""
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(**{**options, **trainer_options}, callbacks=list(callbacks))
    trainer.fit(module, loader or batches(), val_loader)
    return trainer


def weights_of(module):
    """All parameters, one flat tensor."""
    return torch.cat([parameter.detach().flatten().float() for parameter in module.parameters()])
