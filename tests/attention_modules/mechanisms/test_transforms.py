"""Every mechanism under the transforms of torch.func, with more rows than are held at once."""

from functools import partial

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from attention_modules.mechanisms.shared.chunks import CHUNK
from tests.attention_modules.mechanisms.test_equations import CASES, IDS

ROWS = CHUNK + 4
TOKENS = 9  # of the shapes of the cases
each = pytest.mark.parametrize("case", CASES, ids=IDS)


def long_inputs(case):
    """The inputs of a case with more tokens, and one sample."""

    def sizes(shape):
        batch = 1 if len(shape) == 4 or (len(shape) == 3 and shape[0] == 2) else shape[0] if shape else None
        rest = [size - TOKENS + ROWS if size in (TOKENS, TOKENS + 2) else size for size in shape[1:]]
        return (batch, *rest) if shape else ()

    generator = torch.Generator().manual_seed(5)
    shapes = {**dict.fromkeys("qkv", case.shape), **case.tensors}
    return {name: torch.randn(sizes(s), generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def called(function, case, names, *given):
    options = {name: case.options[name] for name in case.shared if name in case.options}
    return function(**dict(zip(names, given, strict=True)), **options)


@each
def test_gradients_are_those_of_the_equation_and_of_autograd(case):
    inputs = long_inputs(case)
    given = tuple(inputs.values())
    which = tuple(range(len(given)))

    def loss(function, *given):
        return called(function, case, inputs, *given).square().sum()

    found = grad(partial(loss, case.function), which)(*given)
    leaves = [x.clone().requires_grad_() for x in given]
    recorded = torch.autograd.grad(loss(case.function, *leaves), leaves, materialize_grads=True)
    for one, other in zip(found, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if case.name != "mom":  # whose equation is no function that can be transformed
        expected = grad(partial(loss, case.twin), which)(*given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    halves = [x * 0.5 for x in given]
    together = vmap(grad(partial(loss, case.function), which))(*map(torch.stack, zip(given, halves, strict=True)))
    for both, one in zip(together, found, strict=True):
        torch.testing.assert_close(both[0], one, rtol=1e-9, atol=1e-9)


@each
def test_derivatives_in_forward_mode_are_those_of_the_backward_pass(case):
    """⟨J t, w⟩ = ⟨t, Jᵀ w⟩, also where the gradient is not that of the output by definition."""
    inputs = long_inputs(case)
    given = tuple(inputs.values())
    function = partial(called, case.function, case, inputs)
    tangents = tuple(torch.randn_like(x) for x in given)
    out, along = jvp(function, given, tangents)
    weights = torch.randn_like(out)
    back = vjp(function, *given)[1](weights)
    expected = sum((one * other).sum() for one, other in zip(back, tangents, strict=True))
    torch.testing.assert_close((along * weights).sum(), expected, rtol=1e-8, atol=1e-8)
