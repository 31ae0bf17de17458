"""Callbacks that act on trained layers, beside Lightning's finetuning, which freezes them for the first epochs."""

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_tasks.callbacks import AttentionDiversification, EntropyRegularizer, LocAteR, QKClip
from tests.lightning_tasks.callbacks.modules import TinyLM, fit, weights_of
from tests.lightning_tasks.callbacks.stabilizers.ranks import TAU
from tests.rows import each_row


class HeadFirst(BaseFinetuning):
    """Trains the head alone in the first epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.net["embed"], pl_module.net["encoder"]])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.net["embed"], pl_module.net["encoder"]], optimizer, lr=0.1)


class Finetuned(TinyLM):
    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.hparams.lr)


@each_row(
    "make",
    [
        lambda: QKClip(TAU),
        lambda: LocAteR(0.1),
        lambda: EntropyRegularizer(10.0, target=0.0),
        lambda: AttentionDiversification(10.0, threshold=0.1),
    ],
)
def test_layers_that_are_trained_later_are_warned_of_and_then_acted_on(make):
    for epochs, same in ((1, True), (2, False)):
        found, plain = Finetuned(), Finetuned()
        with pytest.warns(UserWarning, match=rf"{type(make()).__name__}.*net\.encoder\.layers\.0\.self_attn"):
            fit(found, [HeadFirst(), make()], max_epochs=epochs)
        fit(plain, [HeadFirst()], max_epochs=epochs)
        assert torch.equal(weights_of(found), weights_of(plain)) == same
