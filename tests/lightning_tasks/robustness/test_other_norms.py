"""Attacks in the L1 and L2 norms: against closed forms, and against values of cleverhans 4.0 on the same toy model."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_tasks.callbacks import RobustnessEvaluation
from lightning_tasks.robustness import (
    carlini_wagner,
    hop_skip_jump,
    released_sparse_l1_descent,
    sparse_l1_descent,
)
from tests.lightning_tasks.callbacks.robustness.evaluations import evaluate
from tests.lightning_tasks.robustness.models import STD, batch, convolutional
from tests.lightning_tasks.robustness.modules import TinyClassifier, TinyImages
from tests.rows import each_row

# L2 norms of the changes that cleverhans 4.0.0 finds for the four images of `toy`, seed 0 of torch for HopSkipJump.
ONE_CONSTANT = [0.063987, 0.026641, 0.048781, 0.039822]
CONFIDENT = [0.092882, 0.056243, 0.076342, 0.065091]
FIVE_CONSTANTS = [0.059625, 0.023577, 0.043187, 0.034366]
HOP_SKIP_JUMP = [0.060513, 0.023952, 0.043975, 0.035076]
# Cross-entropies after its sparse L1 descent, eps 3 and steps of 0.3: the 99th percentile unclipped; the 90th clipped.
SPARSE = [7.871725, 8.175015, 7.880677, 6.873449]
SPARSE_CLIPPED = [7.719731, 8.009311, 7.711357, 6.669339]

IMAGES = ((torch.arange(4 * 3 * 6 * 6) * 0.618) % 1).view(4, 3, 6, 6)
LABELS = torch.tensor([2, 2, 2, 0])


def toy(images):
    """A smooth model of three classes, the same for every version of torch."""
    flat = images.flatten(1)
    places = torch.arange(flat.shape[1], dtype=images.dtype)
    features = torch.stack([torch.cos(0.7 * k * places + k) for k in range(1, 6)], 1) / flat.shape[1] ** 0.5
    mix = torch.stack([torch.sin(torch.arange(1.0, 6.0) * c + c).to(images) for c in range(1, 4)], 1)
    return 3 * torch.tanh(4 * (flat - 0.5) @ features) @ mix


def lengths(attacked, images=IMAGES):
    return (attacked - images).flatten(1).norm(dim=1)


def close(found, expected, rel):
    return torch.allclose(found, torch.tensor(expected).to(found), rtol=rel, atol=0)


# -- against cleverhans ------------------------------------------------------------------------------------------------


@each_row(("confidence", "expected"), [(0.0, ONE_CONSTANT), (0.5, CONFIDENT)])
def test_carlini_wagner_of_one_constant_is_that_of_cleverhans(confidence, expected):
    options = {"searches": 1, "steps": 200, "initial_constant": 1.0, "learning_rate": 1e-2, "confidence": confidence}
    attacked = carlini_wagner(toy, IMAGES, LABELS, **options)
    assert close(lengths(attacked), expected, 1e-4)


def test_the_search_for_the_constant_ends_as_near_as_that_of_cleverhans():
    """Which goes on from one constant to the next with what Adam had, where ours starts anew."""
    attacked = carlini_wagner(toy, IMAGES, LABELS, steps=200, learning_rate=1e-2)
    assert close(lengths(attacked), FIVE_CONSTANTS, 0.03)


def test_hop_skip_jump_ends_as_near_as_that_of_cleverhans():
    attacked = hop_skip_jump(toy, IMAGES, LABELS, steps=20)
    assert close(lengths(attacked), HOP_SKIP_JUMP, 0.03)
    assert (toy(attacked).argmax(1) != LABELS).all()


def test_the_released_sparse_l1_descent_is_that_of_cleverhans():
    attacked = released_sparse_l1_descent(toy, IMAGES, LABELS, eps=3.0, std=[1.0, 1.0, 1.0])
    assert close(functional.cross_entropy(toy(attacked), LABELS, reduction="none"), SPARSE, 1e-4)
    assert close((attacked - IMAGES).abs().flatten(1).sum(1), [3.0] * 4, 1e-5)


def test_sparse_l1_descent_keeps_the_best_of_what_cleverhans_passes_through():
    attacked = sparse_l1_descent(toy, IMAGES, LABELS, eps=3.0, sparsity=90)
    found = functional.cross_entropy(toy(attacked), LABELS, reduction="none")
    assert close(found, SPARSE_CLIPPED, 1e-3)
    assert (found >= torch.tensor(SPARSE_CLIPPED) - 1e-5).all()


# -- against closed forms ----------------------------------------------------------------------------------------------


def linear():
    """Two classes in float64: the margin, and the norm of its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2)).double()
    images = 0.3 + 0.4 * torch.rand(3, 3, 4, 4, dtype=torch.float64)
    return model, images, model(images).argmax(1)


@each_row(
    ("attack", "options", "rel"),
    [
        (carlini_wagner, {"steps": 200, "searches": 6, "learning_rate": 1e-2}, 0.01),
        (hop_skip_jump, {"steps": 20, "initial_samples": 60}, 0.05),
    ],
)
def test_the_smallest_change_of_a_linear_model_is_its_margin_by_its_slope(attack, options, rel):
    model, images, labels = linear()
    logits, slope = model(images), (model[1].weight[1] - model[1].weight[0]).norm()
    least = ((logits[:, 1] - logits[:, 0]).abs() / slope).detach()
    attacked = attack(model, images, labels, **options)
    found = lengths(attacked, images)
    assert (model(attacked).argmax(1) != labels).all()
    assert (found >= least * (1 - 1e-9)).all()
    assert (found <= least * (1 + rel)).all()
    middle = found.median().item()
    near = attack(model, images, labels, eps=middle, **options)
    assert torch.equal(near[found > middle], images[found > middle])  # what needs more is taken back
    assert torch.equal(near[found <= middle], attacked[found <= middle])
    swapped = attack(model, images, 1 - labels, **options)
    assert torch.equal(swapped, images)  # wrong as they are


def test_sparse_l1_descent_takes_the_steepest_coordinates_of_a_linear_model():
    model, images, labels = linear()
    weight = model[1].weight[1] - model[1].weight[0]
    attacked = sparse_l1_descent(model, images, labels, eps=0.2, sparsity=97)  # of 48, the two largest
    changed = (attacked - images).flatten(1)
    assert (changed.abs().sum(1) <= 0.2 + 1e-9).all()
    assert all(set(row.nonzero().flatten().tolist()) == set(weight.abs().topk(3).indices.tolist()) for row in changed)


def test_the_released_units_are_those_of_the_normalized_image():
    images, labels = batch()
    attacked = released_sparse_l1_descent(convolutional().eval(), images, labels, eps=10.0, std=STD)
    normalized = (attacked - images) / torch.tensor(STD).view(3, 1, 1)
    assert close(normalized.abs().flatten(1).sum(1), [10.0] * 8, 1e-4)
    assert attacked.max() > 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@each_row(
    ("attack", "options", "says"),
    [
        (carlini_wagner, {"eps": 0}, r"eps is 0: it must be a number above 0 \(inf for no limit\)"),
        (carlini_wagner, {"eps": math.nan}, "eps is nan: it must be a number above 0"),
        (carlini_wagner, {"searches": 0}, "searches=0 must be an integer of at least 1"),
        (carlini_wagner, {"confidence": -1.0}, "confidence=-1.0 must be a number of at least 0"),
        (carlini_wagner, {"initial_constant": 0}, "initial_constant=0 must be a positive number"),
        (sparse_l1_descent, {"eps": math.inf}, r"eps is inf: it must be a number above 0 \(finite\)"),
        (sparse_l1_descent, {"eps": 1.0, "sparsity": 100}, "sparsity=100 must be a percentage above 0 and below 100"),
        (hop_skip_jump, {"most_samples": 2.0}, "most_samples=2.0 must be an integer of at least 1; write 2"),
    ],
)
def test_a_value_out_of_its_range_is_named(attack, options, says):
    with pytest.raises(ValueError, match=says):
        attack(toy, IMAGES, LABELS, **options)


@each_row("attack", [carlini_wagner, hop_skip_jump, sparse_l1_descent])
def test_half_precision_is_refused(attack):
    with pytest.raises(TypeError, match=r"images are torch\.float16: give float32 or float64"):
        attack(toy, IMAGES.half(), LABELS, eps=1.0)


# -- in the table ------------------------------------------------------------------------------------------------------

QUICK = {"name": "carlini_wagner", "steps": 20, "learning_rate": 0.1, "eps": [0.01, 5]}


def test_one_search_tells_of_every_radius_and_of_the_median(tmp_path):
    module = TinyClassifier()
    attacks = [QUICK, {"name": "sparse_l1_descent", "eps": [5], "steps": 2}, {"name": "fgsm", "eps": ["2/255"]}]
    rows = [row for row in evaluate(tmp_path, module, attacks=attacks, eps=[]) if row.test == "attack"]
    found = {(row.name, row.setting, row.metric): row for row in rows}
    assert [*found] == [
        ("carlini_wagner", "0.01", "accuracy"),
        ("carlini_wagner", "5", "accuracy"),
        ("carlini_wagner", "", "median_l2"),
        ("sparse_l1_descent", "5", "accuracy"),
        ("fgsm", "2/255", "accuracy"),
    ]
    images, labels = (torch.cat(parts) for parts in zip(*TinyImages().test_dataloader(), strict=True))
    options = {key: value for key, value in QUICK.items() if key not in ("name", "eps")}
    attacked = carlini_wagner(module.eval(), images, labels, **options)
    stands = module(attacked).argmax(1) == labels
    needed = torch.where(stands, math.inf, lengths(attacked, images))
    assert found["carlini_wagner", "0.01", "accuracy"].value == (needed > 0.01).double().mean()
    assert found["carlini_wagner", "5", "accuracy"].value == stands.double().mean()
    assert found["carlini_wagner", "", "median_l2"].value == pytest.approx(needed.median().item(), rel=1e-4)
    assert found["carlini_wagner", "", "median_l2"].label == "robustness/carlini_wagner/median_l2"


@each_row(
    ("attack", "says"),
    [
        ("hop_skip_jump", r"'hop_skip_jump' has eps=None: give a list of radii in the L2 norm .*eps: \[0.5, 1\]"),
        ({"name": "sparse_l1_descent", "eps": 10}, r"has eps=10: give a list of radii in the L1 norm"),
        ({"name": "carlini_wagner", "eps": [-1]}, r"the attack 'carlini_wagner': eps is -1: .* above 0"),
        ({"name": "carlini_wagner", "eps": [0.5, "1/2"]}, r"'carlini_wagner' has a radius twice in eps=\[0.5, '1/2'\]"),
        ({"name": "pgd", "eps": [3]}, r"the attack 'pgd': eps is 3: it must be a number in \[0, 1\]"),
        (
            {"name": "transfer", "attack": "carlini_wagner", "source": "x"},
            "has eps=None: give a list of radii in the L2",
        ),
        ({"name": "released_sparse_l1_descent", "eps": [10]}, "needs std"),
    ],
)
def test_radii_of_other_norms_are_named(attack, says):
    with pytest.raises(ValueError, match=says):
        RobustnessEvaluation(attacks=[attack])
