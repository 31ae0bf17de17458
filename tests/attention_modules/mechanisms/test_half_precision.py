"""Logits of tens of thousands in half precision, and large values in float32, against float64."""

from __future__ import annotations

import pytest
import torch

from attention_modules import mechanisms as found, naive
from attention_modules.hosts.huggingface.given import bounded
from attention_modules.precision import scaled_logits
from tests.attention_modules.compare import random_heads
from tests.attention_modules.mechanisms.test_equations import CASES, IDS, Case
from tests.rows import pairwise

PLAIN = [
    Case("softmax"),
    Case("uniform"),
    Case("symmetric"),
    Case("rpc", {"iterations": 4, "lam": 4.0}),
    Case("scaled", tensors={"s": (1,)}),
]
ALL = [*CASES, *PLAIN]
each = pytest.mark.parametrize("case", ALL, ids=[*IDS, *(case.name for case in PLAIN)])
TOKENS, WIDTH = 21, 64
# Relative, of the output's norm. Where queries are scaled before the product (ssa), bfloat16 rounds 24,186 by 47.
LIMITS = {torch.float16: 0.02, torch.bfloat16: 0.15}


def _inputs(case, std=1.0, values=1.0):
    """Of a case, with more tokens and wider heads, in float64."""
    generator = torch.Generator().manual_seed(1)
    sizes = {9: TOKENS, 11: TOKENS, 8: WIDTH}
    shapes = {**dict.fromkeys("qkv", case.shape), **case.tensors}
    factors = {"q": std, "k": std, "v": values}
    inputs = {
        name: torch.randn([sizes.get(n, n) for n in shape], generator=generator).double() * factors.get(name, 1.0)
        for name, shape in shapes.items()
    }
    if "gates" in inputs:
        inputs["gates"] = (inputs["gates"] > 0).double()
    if case.name in ("symmetric", "rpc"):
        del inputs["q"]
    return {name: case.signs[name](x) if name in case.signs else x for name, x in inputs.items()}


def _call(case, inputs):
    options = {name: value for name, value in case.options.items() if name in (*case.shared, "lam")}
    return case.function(**inputs, **options)


def _error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("index", "dtype", "autocast"), pairwise(range(len(ALL)), LIMITS, (False, True)))
def test_logits_of_tens_of_thousands(index, dtype, autocast):
    case = ALL[index]
    inputs = {name: x.to(dtype) for name, x in _inputs(case, std=90.0).items()}
    exact = _call(case, {name: x.double() for name, x in inputs.items()})
    leaves = {n: (x.float() if autocast else x).clone().requires_grad_() for n, x in inputs.items()}
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = _call(case, leaves)
    assert _error(out.detach(), exact) <= LIMITS[dtype]
    gradients = torch.autograd.grad(out.float().square().mean(), list(leaves.values()), allow_unused=True)
    assert all(g is None or bool(g.isfinite().all()) for g in gradients)


@each
def test_large_values_in_float32(case):
    inputs = _inputs(case, values=1e4)
    exact = _call(case, {name: x.float().double() for name, x in inputs.items()})
    assert _error(_call(case, {name: x.float() for name, x in inputs.items()}), exact) <= 1e-4


@pytest.mark.parametrize("size", [0.0, 1e3, 1e4])
def test_robust_weights_know_values_that_lie_near_each_other_far_out(size):
    """Where x·y cancels: all values within one of each other, at a distance of ``size`` from zero."""
    inputs = {name: x.float() for name, x in random_heads(shape=(1, 2, 9, 8)).items()}
    inputs["v"] = inputs["v"] + size
    exact = naive.naive_rkde(**{name: x.double() for name, x in inputs.items()})
    spread = (exact - size).norm().item()
    assert (found.rkde_attention(**inputs).double() - exact).norm().item() <= 1e-6 * (spread + 9 * size)


@pytest.mark.parametrize(("std", "iterations"), [(1.0, 3), (90.0, 3), (90.0, 5)])
def test_sinkhorn_and_its_reference_hold_large_logits(std, iterations):
    inputs = {n: x * (std if n in "qk" else 1.0) for n, x in random_heads(shape=(1, 2, 9, 64)).items()}
    actual = found.sinkhorn_attention(**inputs, iterations=iterations)
    torch.testing.assert_close(actual, naive.naive_sinkhorn(**inputs, iterations=iterations), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["entmax", "position_bias", "dam"])
def test_gradients_of_large_values_do_not_overflow(name):
    """The gradient of weights, a sum over the features of the values, is beyond float16 before it is used."""
    case = next(case for case in CASES if case.name == name)
    gradients = []
    for dtype in (torch.float16, torch.float64):
        leaves = {n: x.half().to(dtype).requires_grad_() for n, x in _inputs(case, values=500.0).items()}
        out = _call(case, leaves)
        gradients.append(
            torch.autograd.grad(out, leaves["q"], torch.linspace(-20, 20, out.numel()).view_as(out).to(dtype))[0]
        )
    assert _error(*gradients) <= 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_are_wide(dtype, autocast):
    q, k = (90 * x for x in random_heads("qk", shape=(1, 2, 9, 64)).values())
    q, k = q.to(dtype), k.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits, bound = scaled_logits(q, k), bounded(None, q, k, None, 50.0)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), q.double() @ k.double().mT / 8, rtol=1e-5, atol=1e-2)
    assert bound.dtype == dtype
    assert bound.isfinite().all()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("width", [32, 48])
def test_a_bias_of_keys_beside_a_scale_that_is_no_power_of_two(dtype, width):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, TOKENS, width, generator=generator) * std for std in (90, 90, 1))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    expected = found.sinkhorn_attention(q.double(), k.double(), v.double())
    out = found.sinkhorn_attention(q, k, v).double()
    assert (out - expected).norm() < 0.005 * expected.norm()
