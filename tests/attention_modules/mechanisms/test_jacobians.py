"""Every mechanism under the transforms of torch.func and autograd.functional, with more rows than are held at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_modules import available_mechanisms, mechanism_class, naive
from attention_modules.mechanisms.shared.chunks import CHUNK
from tests.attention_modules.mechanisms.test_equations import CASES, Case, each_mechanism

TOKENS = CHUNK + 2
SIZES = {9: TOKENS, 11: TOKENS + 1, 8: 4}  # of the small cases, and here


def _long(case: Case) -> Case:
    tensors = {name: tuple(SIZES.get(n, n) for n in shape) for name, shape in case.tensors.items()}
    return replace(case, shape=tuple(SIZES.get(n, n) for n in case.shape), tensors=tensors)


class Pair:
    """A mechanism's function and its twin as functions of a tuple of tensors, with a direction for each tensor."""

    def __init__(self, case: Case) -> None:
        case = _long(case)
        given = case.given
        self.names = tuple(case.inputs())
        self.inputs = tuple(case.inputs().values())
        self.directions = tuple(case.inputs(seed=1).values())
        function = case.function
        self.ours = lambda *x: function(**dict(zip(self.names, x, strict=True)), **given)
        self.twin = lambda *x: case.twin(**dict(zip(self.names, x, strict=True)), **given)
        self.places = tuple(range(len(self.names)))

    def freeze(self, name: str) -> None:
        """Hold one of the tensors fixed."""
        at = self.names.index(name)
        fixed, ours, twin = self.inputs[at], self.ours, self.twin
        self.ours = lambda *x: ours(*x[:at], fixed, *x[at:])
        self.twin = lambda *x: twin(*x[:at], fixed, *x[at:])
        self.inputs, self.directions = (x[:at] + x[at + 1 :] for x in (self.inputs, self.directions))
        self.places = self.places[:-1]

    def loss(self, function):
        return lambda *x: (out := function(*x)).mul(out.detach().new_tensor(range(out.shape[-1])).cos()).square().sum()

    def slopes(self, inputs, function=None):
        """Gradients of the loss of the twin, or of another function, by plain autograd."""
        free = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(self.loss(function or self.twin)(*free), free, materialize_grads=True)


def _same(actual, expected, tolerance=1e-9):
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * (1 + wanted.abs().max().item()))


class Other(Case):
    """One of the seed papers' mechanisms, whose twins stand under other names."""

    must = {}  # noqa: RUF012

    @property
    def twin(self):
        return {
            "softmax": naive.naive_attention,
            "symmetric": lambda k, v: naive.naive_attention(k, k, v),
            "rpc": naive.naive_rpc,
            "scaled": naive.naive_scaled,
            "uniform": lambda q, k, v: v.mean(-2, keepdim=True).expand(q.shape) + 0 * (q + k),
        }[self.name]

    def inputs(self, *args, **kwargs):
        found = super().inputs(*args, **kwargs)
        return {name: x for name, x in found.items() if name != "q" or self.name not in ("symmetric", "rpc")}


OTHERS = [
    Other("softmax"),
    Other("symmetric"),
    Other("rpc", {"iterations": 2}),
    Other("scaled", tensors={"s": (3, 9, 9)}),
    Other("scaled", {"s": "number"}, {"s": ()}),
    Other("uniform"),
]
ALL = [*CASES, *OTHERS]
IDS = ["-".join((case.name, *map(str, case.options.values()))) for case in ALL]
each = pytest.mark.parametrize("case", ALL, ids=IDS)


def test_every_mechanism_is_here():
    assert {case.name for case in ALL} >= set(available_mechanisms())


WITHOUT_TWIN = ("mom",)  # whose equation is no function that can be transformed


@each
def test_grad_and_its_vmap(case):
    pair = Pair(case)
    slopes = torch.func.grad(pair.loss(pair.ours), pair.places)
    found = slopes(*pair.inputs)
    _same(found, pair.slopes(pair.inputs, pair.ours))
    if case.name not in WITHOUT_TWIN:
        _same(found, pair.slopes(pair.inputs))
    both = [torch.stack([x, x + 0.1 * y]) for x, y in zip(pair.inputs, pair.directions, strict=True)]
    together = torch.func.vmap(slopes)(*both)
    for i in range(2):
        _same([part[i] for part in together], pair.slopes([x[i] for x in both], pair.ours))


@each_mechanism(ALL, IDS)
def test_jacrev(case):
    pair = Pair(case)
    last = lambda function: lambda *x: function(*x)[0, 0, -1, :2]  # noqa: E731
    actual = torch.func.jacrev(last(pair.ours), pair.places)(*pair.inputs)
    _same(actual, functional.jacobian(last(pair.twin), pair.inputs))


@each
def test_jvp(case):
    """⟨J t, w⟩ = ⟨t, Jᵀ w⟩, also where the gradient is not that of the output by definition."""
    pair = Pair(case)
    out, along = torch.func.jvp(pair.ours, pair.inputs, pair.directions)
    weights = torch.randn_like(out)
    back = torch.func.vjp(pair.ours, *pair.inputs)[1](weights)
    expected = sum((one * other).sum() for one, other in zip(back, pair.directions, strict=True))
    torch.testing.assert_close((along * weights).sum(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", OTHERS, ids=IDS[len(CASES) :])
def test_jvp_of_the_equation(case):
    pair = Pair(case)
    expected = functional.jvp(pair.twin, pair.inputs, pair.directions)
    _same(torch.func.jvp(pair.ours, pair.inputs, pair.directions), expected)
    with sdpa_kernel(SDPBackend.MATH):
        _same(functional.jvp(pair.ours, pair.inputs, pair.directions), expected)


@each_mechanism(ALL, IDS)
def test_hessian_vector_product(case):
    """By torch.func and by autograd.functional in turn."""
    pair = Pair(case)
    if case.name == "hard":  # v is detached in its surrogate: derivatives of second order are those of q and k
        pair.freeze("v")
    if ALL.index(case) % 2:
        slopes = torch.func.grad(pair.loss(pair.ours), pair.places)
        actual = torch.func.jvp(slopes, pair.inputs, pair.directions)[1]
    else:
        with sdpa_kernel(SDPBackend.MATH):
            actual = functional.hvp(pair.loss(pair.ours), pair.inputs, pair.directions)[1]
    if case.name == "entmax":  # the twin's threshold has its first derivative alone
        step, moves = 1e-7, tuple(zip(pair.inputs, pair.directions, strict=True))
        at = [pair.slopes([x + sign * step * y for x, y in moves]) for sign in (1, -1)]
        _same(actual, [(a - b) / (2 * step) for a, b in zip(*at, strict=True)], 1e-5)
        return
    tolerance = 1e-6 if case.name == "dam" else 1e-9  # (10⁴)² times the gate
    _same(actual, functional.hvp(pair.loss(pair.twin), pair.inputs, pair.directions)[1], tolerance)


MADE_AGAIN = {"sigmoid", "entmax", "position_bias", "dam"}
WITH_A_STATE = {name for name in available_mechanisms() if mechanism_class(name).cache == "state"}
WITHOUT_KERNEL = MADE_AGAIN | WITH_A_STATE - {"window"}  # which is softmax of blocks


@each
def test_a_second_derivative_outside_the_math_backend_is_right_or_names_the_cure(case):
    pair = Pair(case)
    inputs = [x.requires_grad_() for x in pair.inputs]

    def second():
        slopes = torch.autograd.grad(pair.loss(pair.ours)(*inputs), inputs, create_graph=True, materialize_grads=True)
        moved = sum((slope * along).sum() for slope, along in zip(slopes, pair.directions, strict=True))
        return torch.autograd.grad(moved, inputs, materialize_grads=True)

    if case.name not in WITHOUT_KERNEL:
        with pytest.raises(RuntimeError, match=r"no second derivative; run the forward pass under .*SDPBackend\.MATH"):
            second()
        return
    found = second()
    with sdpa_kernel(SDPBackend.MATH):
        _same(found, second())
