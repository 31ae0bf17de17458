import pytest
import torch

from attention_modules import AttentionSpec
from attention_modules.mechanisms.uniform import UniformAttention
from attention_modules.testing import CHECKS, check_mechanism


@pytest.fixture
def mechanism():
    return UniformAttention(AttentionSpec(dim=8, num_heads=2, head_dim=4))


def tensors(tokens=5):
    return [torch.randn(3, 2, tokens, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def test_what_every_mechanism_satisfies():
    """All but that the query and the scale of its products act."""
    check_mechanism("uniform", only=CHECKS.keys() - {"query", "scale"})


def test_mean_of_all_values(mechanism):
    q, k, v = tensors()
    torch.testing.assert_close(mechanism(q, k, v), v.mean(2, keepdim=True).expand_as(v))


def test_causal_is_the_running_mean(mechanism):
    q, k, v = tensors()
    count = torch.arange(1, 6).view(5, 1)
    torch.testing.assert_close(mechanism(q, k, v, is_causal=True), v.cumsum(2) / count)


@pytest.mark.parametrize("additive", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_mean_of_the_visible_values(mechanism, additive, is_causal):
    q, k, v = tensors()
    seen = torch.rand(3, 1, 5, 5) > 0.4
    seen[0, 0, 2] = False
    mask = torch.where(seen, torch.randn(seen.shape).double(), float("-inf")) if additive else seen
    counted = (seen & torch.ones(5, 5, dtype=torch.bool).tril() if is_causal else seen).double()
    expected = counted @ v / counted.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(mechanism(q, k, v, attn_mask=mask, is_causal=is_causal), expected)


def test_queries_and_keys_get_zero_gradients(mechanism):
    q, k, v = tensors()
    mechanism(q, k, v, is_causal=True).square().sum().backward()
    assert (q.grad == 0).all()
    assert (k.grad == 0).all()
    assert (v.grad != 0).any()
