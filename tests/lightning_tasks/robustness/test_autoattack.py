"""AutoAttack against its library's own sequence, its flags, and what it leaves behind."""

import sys

import pyautoattack
import pytest
import torch
from torch import nn

from lightning_tasks.robustness import autoattack, run_autoattack
from lightning_tasks.robustness.attacks.auto import STANDARD, autoattack_library
from lightning_tasks.robustness.attacks.table import read_attacks, read_eps
from tests.lightning_tasks.robustness.models import CLASSES, batch, convolutional

EPS, QUERIES = 2 / 255, 40


class Wrapped(nn.Module):
    def __init__(self, network, change):
        super().__init__()
        self.network, self.change = network, change

    def forward(self, images):
        return self.change(self.network(images))


def test_images_in_double_precision_are_refused():
    images, labels = right_from_the_first(convolutional())
    with pytest.raises(TypeError, match="pyautoattack computes in float32"):
        run_autoattack(convolutional().double(), images.double(), labels, eps=EPS)


def right_from_the_first(model, count=12):
    images, _ = batch(count)
    with torch.no_grad():
        return images, model.eval()(images).argmax(1)


@pytest.fixture(scope="module")
def found():
    model = convolutional()
    images, labels = right_from_the_first(model)
    return model, images, labels, run_autoattack(model, images, labels, eps=EPS, queries=QUERIES)


def test_it_is_the_library_standard_version(found):
    model, images, labels, result = found
    run = pyautoattack.AutoAttack(model, eps=EPS, seed=0, version="standard")
    run.square.n_queries, run.apgd_targeted.n_target_classes, run.fab.n_target_classes = (
        QUERIES,
        CLASSES - 1,
        CLASSES - 1,
    )
    with torch.random.fork_rng():
        expected, _ = run.run_standard_evaluation(images, labels)
    assert torch.equal(result.images, expected)
    assert [*result.standing] == ["clean", *STANDARD]


def test_accuracies_fall_and_images_stay_in_the_ball(found):
    model, images, labels, result = found
    shares = [*result.accuracies.values()]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 1
    assert (result.images - images).abs().amax() <= EPS + 1e-6
    assert result.images.amin() >= 0
    assert result.images.amax() <= 1
    right = model(result.images).argmax(1) == labels
    assert torch.equal(right, result.standing["square"])
    assert torch.equal(result.images[right], images[right])  # what stands is as it was
    assert not result.flags


def test_it_leaves_model_random_state_and_trace_alone(found):
    _, images, labels, result = found
    model = convolutional().train()
    state, before = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}

    def trace(frame, event, argument):
        return None

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.inference_mode():
            again = autoattack(model, images, labels, eps=EPS, queries=QUERIES)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(old)
    assert torch.equal(again, result.images)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None and each.requires_grad for each in model.parameters())


FLAGS = {
    "softmax": (lambda logits: logits.softmax(1), "the output is a softmax"),
    "random": (lambda logits: logits + 0.1 * torch.randn_like(logits), "the output is random"),
    "flat": (lambda logits: logits.detach() + 0 * logits, "some gradients are zero"),
}


@pytest.mark.parametrize(("change", "flag"), FLAGS.values(), ids=FLAGS)
def test_flags(change, flag):
    model = Wrapped(convolutional(), change)
    images, labels = right_from_the_first(model)
    # The library looks for zero gradients in the attacks on the DLR loss alone.
    assert flag in run_autoattack(model, images, labels, eps=EPS, attacks=["apgd-dlr"]).flags


def test_square_below_the_others_is_a_flag():
    model = Wrapped(convolutional(), lambda logits: logits.detach() + 0 * logits)  # masked: only Square sees the output
    images, labels = right_from_the_first(model)
    result = run_autoattack(model, images, labels, eps=8 / 255, attacks=["apgd-ce", "square"], queries=QUERIES)
    assert "Square lowers the accuracy of the others" in result.flags
    # Flags are of the run alone: a sound model after it has none.
    model = convolutional()
    images, labels = right_from_the_first(model)
    assert not run_autoattack(model, images, labels, eps=EPS, attacks=["apgd-ce"]).flags


def test_few_classes_and_images_that_are_wrong_from_the_first():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 3))
    images, _ = batch(2)
    with pytest.raises(ValueError, match=r"at least 4 classes .* got 3"):
        run_autoattack(model, images, torch.tensor([0, 1]), eps=EPS)
    model = convolutional()
    images, labels = right_from_the_first(model, 4)
    result = run_autoattack(model, images, (labels + 1) % CLASSES, eps=EPS, queries=QUERIES)
    assert result.accuracies == dict.fromkeys(("clean", *STANDARD), 0)
    assert [*result.flags] == [f"no image was left for {', '.join(STANDARD)}"], "no check has run"
    assert torch.equal(result.images, images)


def test_as_configurations_name_it():
    (setting,) = read_attacks([{"name": "autoattack", "attacks": ["apgd-ce", "square"], "queries": 100}])
    assert setting.options == {"attacks": ["apgd-ce", "square"], "queries": 100}
    assert setting.seeded
    for attacks in (["apgd"], [], ["square", "square"], "square"):
        with pytest.raises(ValueError, match="must be a list of apgd-ce"):
            read_attacks([{"name": "autoattack", "attacks": attacks}])
    assert read_eps("0.25/255") == ("0.25/255", 0.25 / 255)
    for beyond in ("1e400", 10**400):
        with pytest.raises(ValueError, match=r"eps is .*: it must be a number in \[0, 1\]"):
            read_eps(beyond)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(ImportError, match=r"pip install 'attnswap\[robustness\]'"):
        autoattack_library()
