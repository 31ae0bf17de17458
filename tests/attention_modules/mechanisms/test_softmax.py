import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_modules import AttentionSpec, SoftmaxAttention
from attention_modules.naive import naive_attention
from tests.attention_modules.compare import assert_same, masks, random_heads, values_and_gradients
from tests.rows import each_row


@each_row("case", masks())
def test_equals_its_equation(case):
    kwargs, mechanism = masks()[case], SoftmaxAttention(AttentionSpec(24, 3, 8))
    actual = values_and_gradients(lambda q, k, v: mechanism(q, k, v, **kwargs), random_heads())
    expected = values_and_gradients(lambda q, k, v: naive_attention(q, k, v, **kwargs), random_heads())
    assert_same(actual, expected, 1e-12)


def test_is_pytorch_s_attention_to_the_bit():
    q, k, v = random_heads().values()
    mechanism = SoftmaxAttention(AttentionSpec(24, 3, 8))
    assert torch.equal(mechanism(q, k, v, scale=0.3), scaled_dot_product_attention(q, k, v, scale=0.3))


def test_a_cache_works_without_is_causal_and_is_refused_with_it():
    q, k, v = random_heads().values()
    mechanism = SoftmaxAttention(AttentionSpec(24, 3, 8))
    assert torch.allclose(mechanism(q[..., -1:, :], k, v), mechanism(q, k, v)[..., -1:, :])
    with pytest.raises(ValueError, match="attn_mask"):
        mechanism(q[..., -1:, :], k, v, is_causal=True)


def test_forward_mode_works():
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    mechanism = SoftmaxAttention(AttentionSpec(16, 2, 8))
    _, tangent = torch.func.jvp(lambda x: mechanism(x, x, x), (q,), (torch.ones_like(q),))
    assert tangent.isfinite().all()
