"""What a network or a step changes in place is matched as it was."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from attention_modules import SelfAttention
from lightning_tasks.callbacks import Heal
from tests.lightning_tasks.callbacks.healing.healed import DIM, Task, heal


class InPlace(nn.Module):
    """Adds a layer's input to its output in place."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.norm = SelfAttention(DIM, 2), nn.LayerNorm(DIM)

    def forward(self, x):
        normed = self.norm(x)
        out = self.self_attn(normed)
        out += x
        if not torch.is_grad_enabled():  # the teacher's
            normed += 1.0
        return out


@pytest.mark.parametrize("match", ["layers", "output"])
def test_what_a_network_changes_in_place_is_matched_as_it_was(match):
    module = Task()
    module.net.encoder = nn.Sequential(InPlace(), InPlace())

    def halves(batch, batch_idx):
        out = module(batch[0])
        out /= 2
        return cross_entropy(out, batch[1])

    module.training_step = halves
    _, trainer = heal(Heal([{"match": match}]), "softmax", module)
    assert trainer.callback_metrics["heal/loss"] < 1e-10
    assert trainer.callback_metrics["val/drift/relative_error/mean"] < 1e-5
    assert trainer.callback_metrics["val/drift/output_error"] < 1e-5
