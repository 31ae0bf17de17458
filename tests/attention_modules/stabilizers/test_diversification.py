"""The diversification loss and its gradients against the released form."""

import math

import pytest
import torch

from attention_modules.stabilizers import diversification as module
from attention_modules.stabilizers.diversification import diversification_loss
from attention_modules.stabilizers.naive import naive_diversification
from tests.attention_modules.compare import largest_saved
from tests.attention_modules.stabilizers.test_entropy import MASKS, N, inputs, mask


def released(a, threshold):
    """Of maps ``[B, H, N, N]``, by the released code's steps."""
    a = a.mean(1)
    mean = a.mean(1, keepdim=True)
    a, mean = (x * (x > threshold / a.shape[-1]) for x in (a, mean))
    return torch.nn.functional.cosine_similarity(mean, a, dim=-1).mean()


@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.0])
def test_equals_the_released_form(threshold):
    q, k = inputs(N, N)
    a = (q @ k.mT * 0.7).softmax(-1)
    found = diversification_loss(q, k, threshold=threshold, scale=0.7)
    torch.testing.assert_close(found, released(a, threshold))
    torch.testing.assert_close(found, naive_diversification(q, k, threshold, scale=0.7))
    assert 0 < found < 1


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_whole_map_with_its_gradients(name, is_causal, monkeypatch):
    q, k = inputs(N, N)
    given = mask(name, N, N)
    monkeypatch.setattr(module, "CHUNK", 3)
    found = diversification_loss(q, k, threshold=1.2, attn_mask=given, is_causal=is_causal)
    expected = naive_diversification(q, k, 1.2, given, is_causal)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    for one, other in zip(torch.autograd.grad(found, (q, k)), torch.autograd.grad(expected, (q, k)), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)


def test_nothing_visible_and_half_precision_are_finite():
    q, k = inputs(N, N)
    hidden = torch.zeros(1, 1, 1, N, dtype=torch.bool)
    found = diversification_loss(q, k, attn_mask=hidden)
    assert found == 0
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found, (q, k)))
    with torch.autocast("cpu", torch.bfloat16):
        found = diversification_loss(300 * q.bfloat16(), k.bfloat16(), is_causal=True)
    assert found.dtype == torch.float32
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found, (q, k)))


@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (5, 0)])
def test_no_row_or_no_key_is_nothing(rows, keys):
    q, k = (torch.randn(2, 3, number, 8, requires_grad=True) for number in (rows, keys))
    found = diversification_loss(q, k)
    assert found == 0
    assert not any(grad.any() for grad in torch.autograd.grad(found, (q, k)))


def test_second_derivatives():
    q, k = (part[:1, :, :4].detach().requires_grad_() for part in inputs(N, N))
    assert torch.autograd.gradgradcheck(lambda q, k: diversification_loss(q, k, threshold=1.0, is_causal=True), (q, k))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(bad):
    q, k = (part.detach().clone() for part in inputs(N, N))
    q[0, 0, 2] = bad
    assert diversification_loss(q, k).isnan()
    assert diversification_loss(q, k, is_causal=True).isnan()


def test_holds_no_map_of_single_heads(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 32)
    q, k = torch.randn(2, 1, 8, 256, 4).requires_grad_().unbind()
    assert largest_saved(lambda: diversification_loss(q, k)) <= 256 * 256  # of the mean over 8 heads
