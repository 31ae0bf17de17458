"""Frozen networks, copies and averages of one stay that in a trainer, whatever the order of callbacks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lightning_tasks.callbacks import AttentionMonitor, SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit, weights_of
from tests.lightning_tasks.callbacks.networks.momentum_run import Momentum
from tests.lightning_tasks.programs import run_ranks


class Finetuned(TinyLM):
    """Its backbone is frozen by a callback until a later epoch."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({name: self.net[name] for name in ("embed", "encoder")})
        self.head = self.net["head"]
        del self.net

    @property
    def net(self) -> nn.ModuleDict:
        return nn.ModuleDict({**self.backbone, "head": self.head})

    @net.setter
    def net(self, parts: nn.ModuleDict) -> None:
        self.add_module("net", parts)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


@pytest.mark.parametrize(
    ("mechanism", "first"), [("gated", True), ("sink", False), ("symmetric", True), ("differential", False)]
)
def test_a_frozen_backbone_stays_frozen_in_either_order(mechanism: str, first: bool) -> None:
    ended = []
    for unfrozen in (9, 1):
        module = Finetuned()
        swap = SwapAttention(mechanism)
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=unfrozen, backbone_initial_ratio_lr=1.0)
        callbacks = [swap, finetuning] if first else [finetuning, swap]
        fit(module, callbacks, max_epochs=2)
        training = [each.requires_grad for each in module.backbone.parameters()]
        assert not any(training) if unfrozen == 9 else all(training)
        ended.append(module)
    moved = [
        name
        for (name, one), other in zip(ended[0].named_parameters(), ended[1].parameters(), strict=True)
        if "mechanism" in name and not torch.equal(one, other)
    ]
    own = [name for name, _ in ended[0].named_parameters() if "mechanism" in name]
    assert moved == own  # unfrozen, they are in the optimizer


def test_both_orders_end_alike() -> None:
    ends = []
    for first in (True, False):
        torch.manual_seed(0)
        module, swap = Finetuned(), SwapAttention("gated")
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=1.0)
        fit(module, [swap, finetuning] if first else [finetuning, swap], max_epochs=2)
        ends.append(weights_of(module))
    assert torch.equal(*ends)


class Distilling(TinyLM):
    """Beside the network that it trains it has another one, of its own width, that gives features."""

    def __init__(self, when: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 2, 32, batch_first=True)
        self.features = nn.Sequential(nn.Embedding(9, 24), nn.TransformerEncoder(layer, 2))
        self.features.requires_grad_(when != "init")
        self.when = when

    def setup(self, stage: str) -> None:
        self.features.requires_grad_(self.when not in ("init", "setup"))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((self if self.when == "trains" else self.net).parameters(), lr=0.1)


@pytest.mark.parametrize("when", ["init", "setup", "in no optimizer", "trains"])
def test_a_network_that_was_swapped_and_does_not_train_is_named(when: str) -> None:
    module, swap = Distilling(when), SwapAttention("sigmoid")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(module, [swap], max_epochs=1)
    said = [str(each.message) for each in told if "do not train now" in str(each.message)]
    assert len(said) == (when in ("setup", "in no optimizer"))
    assert all("SwapAttention swapped 'features', too" in text for text in said)
    assert (when == "init") != any("features" in row.name for row in swap.report)


def test_softmax_changes_no_network_and_none_is_named(recwarn: pytest.WarningsRecorder) -> None:
    fit(Distilling("setup"), [SwapAttention("softmax")], max_epochs=1)
    assert not any("do not train now" in str(each.message) for each in recwarn)


@pytest.mark.parametrize("mechanism", ["softmax", "gated", "rpc"])
def test_a_momentum_teacher_follows(mechanism: str) -> None:
    module = Momentum()
    fit(module, [SwapAttention(mechanism)], max_steps=4)
    assert module.distances[0] < 1e-5
    assert module.distances[-1] > 1e-4
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())
    assert all(parameter.requires_grad for parameter in module.net.parameters())


@pytest.mark.costly
def test_a_momentum_teacher_follows_in_two_processes() -> None:
    assert [out.split()[-1] for out in run_ranks("tests.lightning_tasks.callbacks.networks.momentum_run", "gated")] == [
        "equal"
    ] * 2


def test_the_monitors_mean_is_per_network() -> None:
    module = Momentum()
    trainer = fit(
        module,
        [SwapAttention("gated"), AttentionMonitor(every_n_steps=1)],
        limit_train_batches=1,
        val_loader=batches(1),
    )
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for stage in ("", "val/"):
        for network_name, layers in (("net", ("00", "01")), ("teacher", ("02", "03"))):
            mean = logged.get(f"{stage}attention/{network_name}/entropy/mean")
            seen = [logged.get(f"{stage}attention/entropy/layer_{layer}") for layer in layers]
            assert mean == pytest.approx(sum(seen) / 2, rel=1e-5)
        assert f"{stage}attention/entropy/mean" not in logged


def test_a_monitor_of_one_network_keeps_its_names() -> None:
    module = Momentum()
    trainer = fit(module, [AttentionMonitor(every_n_steps=1, where="net.*")], max_steps=1)
    assert "attention/entropy/mean" in trainer.callback_metrics
