"""A copy that an object holds which is no module, as those of many weight averages, is named at the swap."""

import copy
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from timm.utils import ModelEma
from torch import nn
from torch.utils.data import DataLoader

from attention_modules import restore_attention, swap_attention
from lightning_tasks.callbacks import SwapAttention


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class OfOurs(nn.Sequential):
    """As a task of ours around the network."""

    __module__ = "lightning_tasks.models"


def _closure(net):
    other = copy.deepcopy(net)
    return lambda x: other(x)


HOLDERS = {
    "ModelEma": ModelEma,
    "namespace": lambda net: SimpleNamespace(shadow=copy.deepcopy(net)),
    "list": lambda net: [copy.deepcopy(net)],
    "method": lambda net: copy.deepcopy(net).forward,
    "closure": _closure,
    "module of ours": lambda net: [copy.deepcopy(OfOurs(net))],
    "pair of a dict": lambda net: {"teacher": (copy.deepcopy(net), 0.9)},
}


def _told(task, mechanism="sigmoid"):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        swap_attention(task, mechanism)
    return [str(each.message) for each in told]


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_copy_that_no_module_has_is_named(holder):
    task = Task()
    task.average = HOLDERS[holder](task.net)
    (text,) = _told(task)
    assert "what 'average' holds" in text
    assert "a copy of 'net.self_attn'" in text
    assert "in __init__" in text


class Lazy(dict):
    """As one that reads its values from files that are gone."""

    def values(self):
        raise FileNotFoundError


def test_what_is_no_copy_or_has_the_mechanism_too_is_not():
    task = Task()
    task.other = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]  # of other weights
    task.itself = [task.net, task.net.forward]
    task.lazy = SimpleNamespace(files=Lazy())
    assert _told(task) == []
    restore_attention(task)
    swap_attention(task, "gated")
    task.average = ModelEma(task.net)
    assert _told(task, "gated") == []
    assert len(_told(task, "sigmoid")) == 1


def test_hyper_parameters_are_no_copies_of_the_models_own():
    class Given(Task):
        def __init__(self, net):
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.net = net

    assert _told(Given(Task().net)) == []


class Average(pl.Callback):
    """One that copies the module in its setup."""

    def setup(self, trainer, pl_module, stage):
        self.shadow = copy.deepcopy(pl_module.net)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_copy_that_a_callback_made_before_the_swap_is_named(first):
    callbacks = [Average(), SwapAttention("gated")] if first else [SwapAttention("gated"), Average()]
    trainer = pl.Trainer(
        max_steps=1, callbacks=callbacks, logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Task(), DataLoader(torch.randn(4, 3, 8), 2))
    assert any("a copy of 'net.self_attn'" in str(each.message) for each in told) == first
