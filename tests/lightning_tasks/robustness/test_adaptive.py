"""A transfer attack on the model itself, whose mechanisms have other options meanwhile."""

import copy
import math

import pytest
import torch

from attention_modules import RPCAttention
from lightning_tasks.robustness import pgd
from lightning_tasks.robustness.attacks.table import AttackSetting, read_eps
from lightning_tasks.robustness.images import attack_measurement
from lightning_tasks.robustness.subject import Subject
from tests.lightning_tasks.robustness.models import batch, vit
from tests.rows import each_row

SETTING = {"name": "transfer", "mechanism": {"iterations": 1, "lam": math.inf}, "steps": 3}
EPS = read_eps("8/255")


def test_it_attacks_with_the_other_options_and_tests_without_them():
    model = vit("rpc", iterations=4, lam=1.0).eval()
    images, labels = batch(8)
    before = model(images)
    other = copy.deepcopy(model)
    for each in other.modules():
        if isinstance(each, RPCAttention):
            each.iterations, each.lam = 1, math.inf
    setting = AttackSetting.read(SETTING)
    assert setting.label == "transfer of pgd with iterations=1, lam=inf"
    measurement = attack_measurement(Subject(model, images, labels, torch.device("cpu")), setting, EPS)
    assert measurement.what["mechanism"] == SETTING["mechanism"]
    (row,) = measurement.measure(lambda share: None)
    attacked = pgd(other, images, labels, eps=EPS[1], steps=3, seed=0)
    assert not torch.equal(attacked, pgd(model, images, labels, eps=EPS[1], steps=3, seed=0))
    with torch.no_grad():
        assert row.value == (model(attacked).argmax(1) == labels).double().mean()
        assert torch.equal(model(images), before)


@each_row(
    ("given", "said"),
    [
        ({"name": "transfer"}, "needs source: .*or mechanism"),
        ({"name": "transfer", "mechanism": {}}, "needs source"),
        ({"name": "transfer", "mechanism": "iterations"}, "mechanism must be options by name, got 'iterations'"),
        ({"name": "transfer", "mechanism": {1: 2}}, "mechanism must be options by name"),
        ({"name": "pgd", "mechanism": {"lam": 1.0}}, "unknown option of pgd 'mechanism'"),
        ({"name": "transfer", "source": 3, "mechanism": {"lam": 1.0}}, "needs source"),
    ],
)
def test_what_it_does_not_take_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        AttackSetting.read(given)
