import pytest
import torch

from attention_modules import AttentionSpec, SymmetricAttention, symmetric_attention
from attention_modules.naive import naive_attention
from tests.attention_modules.compare import assert_same, masks, random_heads, values_and_gradients
from tests.rows import each_row


@each_row("case", masks())
def test_equals_its_equation(case):
    kwargs, inputs = masks()[case], random_heads("kv")
    actual = values_and_gradients(lambda k, v: symmetric_attention(k, v, **kwargs), inputs)
    expected = values_and_gradients(lambda k, v: naive_attention(k, k, v, **kwargs), inputs)
    assert_same(actual, expected, 1e-12)


def test_reads_no_query_and_has_no_parameter():
    mechanism = SymmetricAttention(AttentionSpec(24, 3, 8))
    q, k, v = random_heads().values()
    assert not mechanism.uses_query
    assert not list(mechanism.parameters())
    assert torch.equal(mechanism(q, k, v), mechanism(k, k, v))


def test_a_row_that_sees_nothing_gives_zeros_for_every_kind_of_mask():
    k, v = random_heads("kv", dtype=torch.float32).values()
    for low in (-torch.inf, torch.finfo(torch.float32).min):
        mask = torch.zeros(9, 9)
        mask[4] = low
        assert symmetric_attention(k, v, attn_mask=mask)[..., 4, :].abs().max() == 0
    assert symmetric_attention(k, v, attn_mask=mask == 0)[..., 4, :].abs().max() == 0


def test_fewer_queries_are_the_keys_of_new_tokens():
    q, k, v = random_heads().values()
    mechanism = SymmetricAttention(AttentionSpec(24, 3, 8))
    torch.testing.assert_close(mechanism(k[..., -2:, :], k, v), symmetric_attention(k, v)[..., -2:, :])
    with pytest.raises(ValueError, match=r"symmetric.*9 queries and 4 keys"):
        mechanism(q, k[..., :4, :], v[..., :4, :])
