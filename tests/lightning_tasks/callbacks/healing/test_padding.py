"""Padding counts neither in what Heal matches nor in what DriftMonitor shows, wherever it lies in the output."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from attention_modules.analysis import swap_drift
from lightning_tasks.callbacks import Heal, SwapAttention
from tests.attention_modules.hosts.model.test_seen import Padded, WithPadsInside
from tests.lightning_tasks.callbacks.modules import TinyLM, fit

LENGTHS = torch.tensor([3, 5, 4])


class Task(TinyLM):
    def __init__(self, net):
        super().__init__(lr=0.0)
        self.net = net

    def forward(self, batch):
        x, lengths = batch
        there = torch.arange(x.shape[1]) < lengths[:, None]
        return self.net(x, there if isinstance(self.net, WithPadsInside) else ~there)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()


def build(form):
    torch.manual_seed(0)
    net = WithPadsInside() if form == "inside" else Padded(form)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4)
    return net


@pytest.mark.parametrize("form", ["inside", "registers", "crop", "flat"])
def test_what_is_matched_and_shown_is_without_padding(form):
    torch.manual_seed(2)
    x = torch.randn(3, 5, 16)
    batch = [(x, LENGTHS)]
    matched = []
    for spoiled in (x, x.masked_fill((torch.arange(5) >= LENGTHS[:, None])[..., None], 3.0)):
        loader = DataLoader([(spoiled, LENGTHS)], batch_size=None)
        logged = fit(
            Task(build(form)), [SwapAttention("sink", {"start": 1.0}), Heal([{"match": "output"}])], loader, loader
        ).callback_metrics
        matched.append({name: float(value) for name, value in logged.items() if "heal/" in name or "drift/" in name})
    assert matched[0] == pytest.approx(matched[1], rel=1e-4)
    net = build(form).eval()
    drift = swap_drift(Task(net), "sink", batch, run=lambda model, given: model(given), start=1.0)
    assert matched[0]["val/drift/output_error"] == pytest.approx(drift.output.relative_error, rel=1e-4)


def test_logits_of_several_labels_are_no_softmax():
    net = build("crop")
    net.config = SimpleNamespace(problem_type="multi_label_classification")
    loader = DataLoader([(torch.randn(3, 5, 16), LENGTHS)], batch_size=None)
    with pytest.raises(ValueError, match="one softmax of classes, this is multi_label_classification: match 'output'"):
        fit(Task(net), [SwapAttention("sink"), Heal([{"match": "logits"}])], loader, loader)
