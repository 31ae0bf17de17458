"""The attacks against closed forms, and what each of them owes: its limits, its determinism, an untouched model."""

import copy
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_tasks.robustness import (
    carlini_wagner,
    fgsm,
    hop_skip_jump,
    input_gradient_norms,
    pgd,
    released_fgsm,
    released_pgd,
    released_sparse_l1_descent,
    released_spsa,
    sparse_l1_descent,
    spsa,
    square,
    transfer,
)
from lightning_tasks.robustness.attacks.common import NonFiniteLogitsError
from lightning_tasks.robustness.attacks.square import square_share
from tests.lightning_tasks.robustness.models import CLASSES, STD, Normalized, batch, convolutional, vit
from tests.rows import each_row

EPS = 4 / 255
TWIN = convolutional(seed=9)


def pgd_restarted(model, images, labels, *, eps, seed=0):
    return pgd(model, images, labels, eps=eps, steps=3, restarts=2, seed=seed)


def few_spsa(model, images, labels, *, eps, seed=0):
    return spsa(model, images, labels, eps=eps, steps=2, samples=8, seed=seed)


def few_square(model, images, labels, *, eps, seed=0):
    return square(model, images, labels, eps=eps, queries=12, seed=seed)


def from_twin(model, images, labels, *, eps):
    return transfer(model, images, labels, eps=eps, source=TWIN, steps=2)


WHITE_BOX = {"fgsm": fgsm, "pgd": pgd_restarted}
SEEDED = {"pgd": pgd_restarted, "spsa": few_spsa, "square": few_square}
CLIPPED = {**WHITE_BOX, "spsa": few_spsa, "square": few_square, "transfer": from_twin}


def released(attack):
    return lambda model, images, labels, *, eps: attack(model, images, labels, eps=eps, std=STD)


EVERY = {**CLIPPED, **{each.__name__: released(each) for each in (released_fgsm, released_pgd)}}
EVERY["released_spsa"] = lambda *batch, eps: released_spsa(*batch, eps=eps, std=STD, steps=2, samples=4)


OTHER_NORMS = {  # whose radii are larger
    "carlini_wagner": lambda *batch, eps: carlini_wagner(
        *batch, eps=200 * eps, steps=20, searches=5, learning_rate=0.1
    ),
    "sparse_l1_descent": lambda *batch, eps: sparse_l1_descent(*batch, eps=200 * eps, steps=3),
    "released_sparse_l1_descent": lambda *batch, eps: released_sparse_l1_descent(*batch, eps=200 * eps, std=STD),
    "hop_skip_jump": lambda *batch, eps: hop_skip_jump(*batch, eps=5000 * eps, steps=2, initial_samples=4),
}
ALL = {**EVERY, **OTHER_NORMS}


def each_of(attacks):
    return pytest.mark.parametrize("attack", attacks.values(), ids=attacks.keys())


def loss(model, images, labels):
    model.eval()
    with torch.no_grad():
        return functional.cross_entropy(model(images), labels, reduction="none")


# -- against closed forms ----------------------------------------------------------------------------------------------


def linear(classes=2):
    """A linear model with weights of both signs, in float64, and its images well inside [0, 1]."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, classes)).double()
    generator = torch.Generator().manual_seed(3)
    images = 0.3 + 0.4 * torch.rand(16, 3, 6, 6, generator=generator, dtype=torch.float64)
    return model, images, torch.randint(0, classes, (16,), generator=generator)


@each_of(WHITE_BOX)
@pytest.mark.parametrize("eps", [1 / 255, 0.1])
def test_white_box_attacks_reach_the_worst_case_of_a_linear_model(attack, eps):
    model, images, labels = linear()
    weight = model[1].weight
    # With two classes the margin falls by eps · ‖w_y - w_other‖₁ at the worst point of the ball.
    sign = 1 - 2 * labels
    margin = (model(images)[:, 1] - model(images)[:, 0]) * -sign
    worst = margin - eps * (weight[1] - weight[0]).norm(1)
    found = loss(model, attack(model, images, labels, eps=eps), labels)
    assert torch.allclose(found, functional.softplus(-worst), atol=1e-9)


def test_clipping_counts_in_the_worst_case():
    model, images, labels = linear()
    images = images.round()  # every value at 0 or 1: only moves into the image are left
    direction = ((model[1].weight[1] - model[1].weight[0]) * (1 - 2 * labels).unsqueeze(1)).view(images.shape)
    worst = (images + 0.1 * direction.sign()).clamp(0, 1)
    assert torch.allclose(fgsm(model, images, labels, eps=0.1), worst)
    assert torch.allclose(
        loss(model, pgd(model, images, labels, eps=0.1), labels), loss(model, worst, labels), atol=1e-9
    )


def few_queries(model, images, labels, *, eps):
    return square(model, images, labels, eps=eps, queries=300)


@each_of({"spsa": spsa, "square": few_queries})
def test_gradient_free_attacks_come_near_the_worst_case(attack):
    model, images, _ = linear()
    model[1].bias.data[1] += 10  # right with a wide margin, where Square does not stop
    labels = torch.ones(16, dtype=torch.int64)

    def fall(attacked):
        logits = model(images) - model(attacked)
        return (logits[:, 1] - logits[:, 0]).detach()

    worst = 0.05 * (model[1].weight[1] - model[1].weight[0]).norm(1)
    found = fall(attack(model, images, labels, eps=0.05))
    assert (found <= worst + 1e-9).all()
    assert (found > 0.7 * worst).all()


def test_the_gradient_norms_of_a_linear_model():
    model, images, labels = linear()
    slope = torch.sigmoid(-((model(images)[:, 1] - model(images)[:, 0]) * (2 * labels - 1)))
    difference = model[1].weight[1] - model[1].weight[0]
    first, second = input_gradient_norms(model, images, labels)
    assert torch.allclose(first, slope * difference.norm(1))
    assert torch.allclose(second, slope * difference.norm(2))


@pytest.mark.parametrize("make", [convolutional, vit, lambda: vit("rpc", iterations=4, lam=0.5, layers=[0])])
def test_pgd_is_never_below_fgsm_nor_below_the_clean_image(make):
    model, (images, labels) = make(), batch()
    for eps in (1 / 255, 16 / 255):
        weak = loss(model, fgsm(model, images, labels, eps=eps), labels)
        for options in ({"steps": 1}, {"steps": 5, "random_start": False}, {"steps": 5, "restarts": 2}):
            strong = loss(model, pgd(model, images, labels, eps=eps, **options), labels)
            assert (strong >= weak - 1e-6).all()
            assert (strong >= loss(model, images, labels) - 1e-6).all()


def test_more_restarts_are_never_worse():
    model, (images, labels) = convolutional(), batch()
    one, four = (pgd(model, images, labels, eps=0.1, steps=3, restarts=count) for count in (1, 4))
    assert (loss(model, four, labels) >= loss(model, one, labels) - 1e-6).all()


def test_square_only_ever_helps_and_stops_where_the_model_is_wrong():
    model, (images, labels) = convolutional(), batch(16)
    labels[:8] = model.eval()(images[:8]).argmax(1)
    wrong = model(images).argmax(1) != labels
    attacked = square(model, images, labels, eps=0.1, queries=50)
    assert wrong.any()
    assert not wrong.all()
    assert torch.equal(attacked[wrong], images[wrong])
    assert not torch.equal(attacked[~wrong], images[~wrong])


def test_the_schedule_of_square_is_the_published_one():
    shares = [square_share(0.8, query, 10_000) for query in (0, 10, 11, 50, 51, 201, 501, 1001, 2001, 4001, 6001, 8001)]
    assert shares == [0.8 / 2**halvings for halvings in (0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9)]


# -- limits ------------------------------------------------------------------------------------------------------------


@each_of(CLIPPED)
def test_the_change_stays_within_eps_and_the_image_in_0_to_1(attack):
    model, (images, labels) = convolutional(), batch()
    for eps in (0, 1 / 255, 0.3, 1):
        attacked = attack(model, images, labels, eps=eps)
        assert attacked.shape == images.shape
        assert attacked.dtype == images.dtype
        assert (attacked - images).abs().max() <= eps + 1e-6, eps
        assert attacked.min() >= 0
        assert attacked.max() <= 1
        assert not attacked.requires_grad
        assert eps == 0 or not torch.equal(attacked, images), eps


@each_of(CLIPPED)
def test_no_model_is_shown_anything_outside_of_0_to_1(attack):
    shown = []

    class Watched(nn.Module):
        def forward(self, images):
            shown.append(images.detach())
            return images.flatten(1)[:, :CLASSES]

    images, labels = batch()
    attack(Watched(), images.round(), labels, eps=0.3)  # every sample beside an image leaves the range
    assert min(each.min() for each in shown) >= 0
    assert max(each.max() for each in shown) <= 1


def test_square_goes_on_at_a_tie():
    """The lower of two equal logits counts, so that the image would stand."""

    class Tied(nn.Module):
        def forward(self, images):
            second = (images.mean((1, 2, 3)) - 0.5).relu()
            return torch.stack([torch.zeros_like(second), second], 1)

    images, labels = torch.full((2, 3, 8, 8), 0.5), torch.zeros(2, dtype=torch.int64)
    attacked = square(Tied(), images, labels, eps=0.1, queries=50)
    assert (Tied()(images).argmax(1) == 0).all()
    assert (Tied()(attacked).argmax(1) == 1).all()
    wrong = torch.ones(2, dtype=torch.int64)  # the higher class of the two
    assert torch.equal(square(Tied(), images, wrong, eps=0.1, queries=50), images)


def test_a_gradient_in_half_precision_is_not_lost():
    """That of a sure prediction is below the smallest number of float16."""

    class Half(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, images):
            first = 17 + images.mean((1, 2, 3))
            return (torch.stack([first, -images.square().mean((1, 2, 3))], 1) * self.scale).half()

    images, labels = torch.full((2, 3, 8, 8), 0.5), torch.zeros(2, dtype=torch.int64)
    attacked = fgsm(Half(1.0), images, labels, eps=0.1)
    assert (attacked - images).abs().min() > 0.09
    norms = input_gradient_norms(Half(1.0), images, labels)[0]
    own = images.double().requires_grad_()
    functional.cross_entropy(
        torch.stack([17 + own.mean((1, 2, 3)), -own.square().mean((1, 2, 3))], 1), labels, reduction="sum"
    ).backward()
    assert norms.double() == pytest.approx(own.grad.flatten(1).norm(1, dim=1), rel=0.5)  # p rounds to 1 in float32
    assert not fgsm(Half(0.0), images, labels, eps=0.1).isnan().any()


def test_nor_is_one_that_goes_through_half_precision_to_wider_logits():
    class Inside(nn.Module):
        def forward(self, images):
            first = images.mean((1, 2, 3)).half()
            return torch.stack([17 + first, -first], 1).float()

    images, labels = torch.full((2, 3, 8, 8), 0.5), torch.zeros(2, dtype=torch.int64)
    assert (fgsm(Inside(), images, labels, eps=0.1) - images).abs().min() > 0.09


# -- a model left as it was --------------------------------------------------------------------------------------------


@each_of(ALL)
def test_the_answer_is_the_same_in_every_gradient_mode(attack):
    model, (images, _) = vit("rpc", iterations=3, lam=0.5).eval(), batch(4)
    labels = model(images).argmax(1)  # Square leaves alone what is wrong already
    expected = attack(model, images, labels, eps=EPS)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            attacked = attack(model, images + 0, labels + 0, eps=EPS)  # made in that mode
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert torch.equal(attacked, expected), mode
        smallest = attack in (OTHER_NORMS["carlini_wagner"], OTHER_NORMS["hop_skip_jump"])  # here no change is found
        assert smallest or not torch.equal(attacked, images)


@each_of(ALL)
def test_the_model_is_left_as_it_was(attack):
    model, (images, labels) = convolutional(), batch()
    model.train()
    model.network[1].eval()
    model.network[0].weight.requires_grad_(False)
    model.network[0].bias.grad = torch.full_like(model.network[0].bias, 7.0)
    modes = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before, image_copy, random_state = loss(model, images, labels), images.clone(), torch.get_rng_state()
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    attack(model, images, labels, eps=EPS)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert grad is None if parameter.grad is None else torch.equal(parameter.grad, grad)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(images, image_copy)
    assert not images.requires_grad
    assert torch.equal(loss(model, images, labels), before)
    assert torch.equal(torch.get_rng_state(), random_state)


@each_of({"spsa": few_spsa, "square": few_square, "hop_skip_jump": OTHER_NORMS["hop_skip_jump"]})
def test_gradient_free_attacks_record_no_gradient(attack):
    class Watched(nn.Module):
        def forward(self, images):
            assert not torch.is_grad_enabled()
            return images.flatten(1)[:, :CLASSES]

    attack(Watched(), *batch(), eps=EPS)


def test_the_model_is_left_as_it_was_by_an_attack_that_fails():
    class Broken(nn.Module):
        def forward(self, images):
            raise RuntimeError("broken")

    model = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        fgsm(model, *batch(), eps=EPS)
    assert model.training


@each_of(ALL)
def test_frozen_models_can_be_attacked(attack):
    model, (images, labels) = convolutional().requires_grad_(False), batch()
    assert not torch.equal(attack(model, images, labels, eps=EPS), images)


@each_of(SEEDED)
def test_the_seed_decides(attack):
    model, (images, labels) = convolutional(), batch()
    first, again, other = (attack(model, images, labels, eps=0.3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autocast_around_the_attack(mode):
    model, (images, labels) = vit().eval(), batch(4)
    with torch.autocast("cpu", dtype=torch.bfloat16), mode():
        model(images)  # autocast now keeps weights that were cast in this mode
        attacked = pgd(model, images, labels, eps=EPS, steps=2)
    assert attacked.dtype == torch.float32
    assert loss(model, attacked, labels).mean() > loss(model, images, labels).mean()


# -- bad input ---------------------------------------------------------------------------------------------------------


@each_row(
    ("attack", "eps"),
    zip(EVERY.values(), [8, -0.1, float("nan"), "4", True, np.float32("nan"), np.bool_(True), 8], strict=True),
)
def test_eps_outside_of_0_to_1_is_an_error(attack, eps):
    with pytest.raises(ValueError, match=r"eps is .*\[0, 1\]"):
        attack(convolutional(), *batch(), eps=eps)


@pytest.mark.parametrize("eps", [np.float32(0.25), np.float64(0.25), np.int64(0), Fraction(1, 4)])
def test_eps_can_be_any_real_number(eps):
    model, (images, labels) = convolutional(), batch()
    assert torch.equal(fgsm(model, images, labels, eps=eps), fgsm(model, images, labels, eps=float(eps)))


@each_of({**WHITE_BOX, **{name: OTHER_NORMS[name] for name in ("carlini_wagner", "sparse_l1_descent")}})
def test_a_model_without_gradients_is_an_error_that_names_the_cure(attack):
    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = convolutional()

        @torch.no_grad()
        def forward(self, images):
            return self.network(images)

    class Detached(NoGrad):
        def forward(self, images):
            return self.network(images.detach())

    class Rounded(NoGrad):
        def forward(self, images):
            return self.network(images.round().long().float()) + 0 * self.network.network[-1].bias

    for model in (NoGrad(), Detached(), Rounded()):
        with pytest.raises(ValueError, match=r"gives no gradient .* square or spsa"):
            attack(model, *batch(), eps=EPS)
    assert few_square(NoGrad(), *batch(), eps=0.3).shape == (8, 3, 12, 12)
    assert few_spsa(NoGrad(), *batch(), eps=0.3).shape == (8, 3, 12, 12)


@each_row(
    ("change", "error", "says"),
    [
        (lambda images, labels: (images * 255, labels), ValueError, r"in \[0, 255\]: give them in \[0, 1\]"),
        (lambda images, labels: (images - 0.5, labels), ValueError, r"in \[-0.5, 0.5\]"),
        (lambda images, labels: (images * float("nan"), labels), ValueError, r"in \[nan, nan\]"),
        (lambda images, labels: (images.half(), labels), TypeError, "float16: give float32"),
        (lambda images, labels: (images[0], labels), ValueError, r"\[B, C, H, W\]"),
        (lambda images, labels: (images, labels[:3]), ValueError, r"labels \[B\].*, got .* \[3\]"),
        (lambda images, labels: (images, labels.float()), TypeError, "int64"),
        (lambda images, labels: (images, labels + 1), ValueError, "labels are in 1 to 5: the model has classes 0 to 4"),
        (lambda images, labels: (images, labels - 100), ValueError, "labels are in -100"),
    ],
)
def test_bad_batches_are_named(change, error, says):
    images, _ = batch()
    labels = torch.tensor([0, 4, 1, 2, 3, 0, 1, 2])
    for attack in (CLIPPED["pgd"], CLIPPED["square"]):
        with pytest.raises(error, match=says):
            attack(convolutional(), *change(images, labels), eps=EPS)


@each_row(
    ("attack", "options", "says"),
    [
        (pgd, {"steps": 0}, "steps=0"),
        (pgd, {"restarts": 0}, "restarts=0"),
        (spsa, {"samples": 3}, "samples=3"),
        (spsa, {"delta": 0.0}, "delta=0.0"),
        pytest.param(spsa, {"delta": 10**400}, "delta=1000", id="beyond a float"),
        (square, {"queries": 0}, "queries=0"),
        (square, {"initial_share": 1.5}, "initial_share=1.5"),
        (square, {"queries": 1e3}, r"queries=1000.0 must be an integer of at least 1; write 1000"),
        (pgd, {"step_size": -1}, "step_size=-1 must be a positive number, or None"),
        (pgd, {"step_size": True}, "step_size=True must be a positive number"),
        (pgd, {"steps": 2.5}, "steps=2.5 must be an integer of at least 1$"),
        (pgd, {"random_start": 1}, "random_start=1 must be True or False"),
        (spsa, {"learning_rate": float("inf")}, "learning_rate=inf must be a positive number"),
        (released_fgsm, {"std": [0.2, 0.2, 0.0]}, r"std=\[0.2, 0.2, 0.0\] must be a list of positive numbers"),
        (released_fgsm, {"std": [0.2]}, "give 3 positive numbers"),
        (
            transfer,
            {"source": Normalized(nn.Sequential(nn.Flatten(), nn.Linear(432, 3)))},
            "5 classes and the source 3",
        ),
    ],
)
def test_options_out_of_their_limits_are_named(attack, options, says):
    with pytest.raises(ValueError, match=says):
        attack(convolutional(), *batch(), eps=EPS, **options)


def test_a_model_that_returns_something_else_is_an_error():
    with pytest.raises(ValueError, match=r"logits \[B, classes\] of 8 images, got \[8, 3, 12, 12\]"):
        fgsm(nn.Identity(), *batch(), eps=EPS)


def test_a_model_made_in_inference_mode_is_an_error_that_names_the_cure():
    images, labels = batch()
    with torch.inference_mode():
        model = convolutional()
    with pytest.raises(ValueError, match=r"holds tensors made in inference mode.*inference_mode=False"):
        fgsm(model, images, labels, eps=EPS)


@each_of(ALL)
def test_a_model_of_one_logit_is_an_error(attack):
    class Single(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :1]

    images, labels = batch()
    with pytest.raises(ValueError, match="Single gives 1 logit per image: an attack needs at least 2 classes"):
        attack(Single(), images, labels * 0, eps=EPS)


@each_of(ALL)
def test_a_model_that_gives_nan_or_inf_is_an_error(attack):
    value = float("nan") if attack in (fgsm, few_spsa, from_twin) else float("inf")

    class Diverged(nn.Module):
        def forward(self, images):
            logits = images.flatten(1)[:, :CLASSES].clone()
            logits[0, 2] = value
            return logits

    with pytest.raises(
        ValueError, match=r"Diverged gives logits that are not finite \(nan or inf\) for 1 of \d images"
    ):
        attack(Diverged(), *batch(), eps=EPS)


class Rooted(nn.Module):
    def forward(self, images):
        return (images * 0).sqrt().flatten(1)[:, :CLASSES]


def test_a_gradient_of_nan_is_an_error():
    with pytest.raises(NonFiniteLogitsError, match="gradient that is not finite"):
        fgsm(Rooted(), *batch(), eps=EPS)


def test_of_a_transfer_the_source_is_told_from_the_model():
    """Figures are of the model: what the source lacks is no nan of theirs."""
    with pytest.raises(ValueError, match="the source of the transfer attack: Rooted gives a gradient") as caught:
        transfer(convolutional(), *batch(), eps=EPS, source=Rooted())
    assert not isinstance(caught.value, NonFiniteLogitsError)
    both = Rooted()
    with pytest.raises(NonFiniteLogitsError, match=r"^Rooted gives a gradient"):
        transfer(both, *batch(), eps=EPS, source=both)
    transfer(both, *batch(), eps=EPS, source=convolutional(), steps=1)


NETWORK = nn.Sequential(nn.Conv2d(3, 2, 8), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten())


class Calls:
    def __init__(self, network):
        self.network = network

    def __call__(self, images):
        return self.network(images)

    def method(self, images):
        return self.network(images)


def test_a_network_that_a_function_calls_is_left_as_it_was():
    here, images, labels = copy.deepcopy(NETWORK), torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    several, outer = [here], lambda x: NETWORK(x)
    functions = [lambda x: sum(each(x) for each in several), lambda x: outer(x - 0.5)]
    functions += [lambda x: NETWORK(x - 0.5), lambda x: here(x - 0.5), Calls(here), partial(Calls(here)), here.forward]
    for function in functions:
        random = torch.get_rng_state()
        fgsm(function, images, labels, eps=0.1)
        assert torch.equal(torch.get_rng_state(), random)
    for network in (NETWORK, here):
        assert network.training
        assert network[1].num_batches_tracked == 0


def test_no_graph_is_kept_as_compiled_models_refuse_to():
    class Keeps(nn.Module):
        def forward(self, images):
            self.out = torch.stack([images.square().mean((1, 2, 3)), images.exp().mean((1, 2, 3))], 1)
            return self.out

    model = Keeps()
    fgsm(model, torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), eps=0.1)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        model.out.sum().backward()
