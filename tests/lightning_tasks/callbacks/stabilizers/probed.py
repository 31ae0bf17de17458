"""A module whose training step takes a gradient of its own, and the gradients of a step."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from tests.lightning_tasks.callbacks.modules import TinyLM, fit


class Probed(TinyLM):
    """Moves the embeddings by the sign of the gradient of a first forward pass, and trains on a second."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])

        def loss_of(x):
            return cross_entropy(self.net["head"](self.net["encoder"](x, mask=mask)).flatten(0, 1), targets.flatten())

        return self.step(self.net["embed"](inputs), loss_of)

    def step(self, x, loss_of):
        (self.probe,) = torch.autograd.grad(loss_of(x), x)
        self.forget()
        return loss_of(x + 0.1 * self.probe.sign())

    def forget(self):
        """Of a first forward pass, whose penalty is not part of the loss."""
        self.seen = []


def gradients(module, *callbacks, loader=None, **options):
    """Of every parameter before the only step, in float64."""
    found = {}

    class Keeps(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            found.update({name: part.grad.clone() for name, part in pl_module.named_parameters()})

    if "plugins" in options:
        module.double()
    else:
        options["precision"] = "64-true"
    with sdpa_kernel(SDPBackend.MATH):  # which is differentiable twice
        fit(module, [*callbacks, Keeps()], loader, max_steps=1, **options)
    return found
