"""Gradient ascent on the local Lipschitz constant."""

import pytest
import torch

from attention_modules import SelfAttention
from attention_modules.analysis import ascend_lipschitz, local_lipschitz
from attention_modules.analysis.lipschitz import Jacobian


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_grow_and_norms_stay(dtype):
    layer, x = SelfAttention(8, num_heads=2).to(dtype), 3 * torch.randn(3, 6, 8, dtype=dtype)
    before = local_lipschitz(layer, x, max_iter=60).value
    found = ascend_lipschitz(layer, x, steps=20)
    assert (local_lipschitz(layer, found, max_iter=60).value > 1.2 * before).all()
    torch.testing.assert_close(found.norm(dim=2), x.norm(dim=2))
    assert not found.requires_grad
    assert torch.equal(found, ascend_lipschitz(layer, x, steps=20))


def test_samples_are_apart_and_no_step_is_no_change():
    layer, x = SelfAttention(4, num_heads=1).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.equal(ascend_lipschitz(layer, x, steps=0), x)
    other = torch.cat([x[:1], torch.randn(1, 3, 4, dtype=torch.float64)])
    torch.testing.assert_close(ascend_lipschitz(layer, x, steps=5)[0], ascend_lipschitz(layer, other, steps=5)[0])


def test_a_known_maximum_is_reached():
    """f(x) = x³/3 of one token has the Jacobian diag(x²): largest, at this norm, with all of it in one place."""
    x = torch.tensor([[[1.0, 2.0, 2.0]]], dtype=torch.float64)
    found = ascend_lipschitz(lambda x: x**3 / 3, x, steps=60)
    assert local_lipschitz(lambda x: x**3 / 3, found).value.item() == pytest.approx(9, rel=1e-3)


def test_of_all_inputs_that_were_seen_the_worst_is_kept(monkeypatch):
    seen, times = [], Jacobian.times

    def recorded(jacobian, v):
        out = times(jacobian, v)
        seen.append((out.norm().item(), jacobian.x.detach().clone()))
        return out

    monkeypatch.setattr(Jacobian, "times", recorded)
    torch.manual_seed(6)
    found = ascend_lipschitz(lambda x: torch.sin(3 * x), torch.randn(1, 1, 6, dtype=torch.float64), steps=6, length=3.0)
    sizes = [size for size, _ in seen]
    worst = sizes.index(max(sizes))
    assert worst < 6  # steps this long overshoot: the last input is not the worst
    assert torch.equal(found, seen[worst][1])


def test_no_input_of_a_linear_function_is_worse():
    x, weight = torch.randn(2, 3, 4), torch.randn(4, 5)
    assert torch.equal(ascend_lipschitz(lambda x: x @ weight, x), x)
    assert torch.equal(ascend_lipschitz(lambda x: x + x @ weight @ weight.mT, x), x)


@pytest.mark.parametrize("size", [1e-24, 1e24])
def test_sizes_whose_squares_are_out_of_range(size):
    x = torch.randn(2, 3, 4)
    expected = ascend_lipschitz(torch.tanh, x, steps=5)
    torch.testing.assert_close(ascend_lipschitz(lambda x: torch.tanh(x) * size, x, steps=5), expected)


def test_refusals():
    x = torch.randn(1, 2, 3)
    for options in ({"steps": -1}, {"steps": True}, {"length": 0.0}, {"length": torch.inf}, {"length": 10**400}):
        with pytest.raises(ValueError, match="must be"):
            ascend_lipschitz(torch.tanh, x, **options)
    for options in ({"length": "1"}, {"generator": 3}):
        with pytest.raises(TypeError, match="must be"):
            ascend_lipschitz(torch.tanh, x, **options)
    with pytest.raises(ValueError, match="NaN"):
        ascend_lipschitz(torch.tanh, x * torch.nan)
