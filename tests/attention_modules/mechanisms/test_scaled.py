import itertools

import pytest
import torch

from attention_modules import AttentionSpec, ScaledAttention, SoftmaxAttention, scaled_attention
from attention_modules.naive import naive_scaled
from tests.attention_modules.compare import assert_same, masks, random_heads, values_and_gradients
from tests.rows import each_row

SPEC = AttentionSpec(24, 3, 8, num_tokens=9)


def inputs(variant: str) -> dict[str, torch.Tensor]:
    shape = (3, 9, 9) if variant == "matrix" else (1,)
    generator = torch.Generator().manual_seed(7)
    return {**random_heads(), "s": torch.randn(shape, generator=generator, dtype=torch.float64)}


@each_row(("case", "variant"), itertools.product(masks(), ["matrix", "scalar"]))
def test_equals_its_equation(variant, case):
    kwargs = masks()[case]
    actual = values_and_gradients(lambda q, k, v, s: scaled_attention(q, k, v, s, **kwargs), inputs(variant))
    expected = values_and_gradients(lambda q, k, v, s: naive_scaled(q, k, v, s, **kwargs), inputs(variant))
    assert_same(actual, expected, 1e-12)


@each_row(("case", "variant"), itertools.product(masks(), ["matrix", "scalar"]))
def test_starts_as_plain_attention(variant, case):
    q, k, v = (x.float() for x in random_heads().values())
    kwargs = {n: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in masks()[case].items()}
    assert torch.equal(ScaledAttention(SPEC, variant)(q, k, v, **kwargs), SoftmaxAttention(SPEC)(q, k, v, **kwargs))


@pytest.mark.parametrize("variant", ["matrix", "scalar"])
def test_its_parameter_gets_a_gradient_from_the_start(variant):
    mechanism = ScaledAttention(SPEC, variant)
    mechanism(*(x.float() for x in random_heads().values())).square().sum().backward()
    assert mechanism.s.grad.abs().max() > 0
    assert mechanism.s.shape == ((3, 9, 9) if variant == "matrix" else (1,))


def test_shorter_sequences_use_the_first_rows_and_columns():
    mechanism = ScaledAttention(SPEC).double()
    torch.nn.init.normal_(mechanism.s)
    q, k, v = (x[..., :5, :] for x in random_heads().values())
    assert torch.allclose(mechanism(q, k, v), naive_scaled(q, k, v, mechanism.s[:, :5, :5]))


def test_longer_sequences_are_refused():
    q, k, v = random_heads(shape=(2, 3, 10, 8)).values()
    with pytest.raises(ValueError, match=r"at most 9 tokens.*got 10"):
        ScaledAttention(SPEC)(q, k, v)


def test_the_matrix_needs_the_number_of_tokens():
    with pytest.raises(ValueError, match=r"num_tokens.*variant='scalar'"):
        ScaledAttention(AttentionSpec(24, 3, 8))
    assert ScaledAttention(AttentionSpec(24, 3, 8), "scalar").s.numel() == 1


def test_the_number_of_tokens_can_be_an_option():
    assert ScaledAttention(AttentionSpec(24, 3, 8), num_tokens=5).s.shape == (3, 5, 5)
    assert ScaledAttention(SPEC, num_tokens=5).spec.num_tokens == 5
    with pytest.raises(ValueError, match="num_tokens must be an integer of at least 1, got 0"):
        ScaledAttention(SPEC, num_tokens=0)


def test_an_unknown_variant_is_an_error():
    with pytest.raises(ValueError, match="'matrix', 'scalar', got 'vector'"):
        ScaledAttention(SPEC, "vector")


def test_wrong_shapes_are_errors():
    q, k, v = random_heads().values()
    with pytest.raises(ValueError, match=r"\(3, 9, 9\), got \(9, 9\)"):
        scaled_attention(q, k, v, torch.zeros(9, 9))
    with pytest.raises(ValueError, match=r"scaled.*1 queries and 9 keys"):
        scaled_attention(q[..., :1, :], k, v, torch.zeros(1))


@pytest.mark.parametrize("shape", [(0, 1, 1, 5), (0, 1, 5, 5), (1, 1, 5, 5)])
def test_an_empty_batch_with_a_mask_a_sample(shape):
    q, k, v = torch.randn(3, 0, 2, 5, 4)
    for s in (torch.randn(2, 5, 5), torch.randn(1)):
        assert scaled_attention(q, k, v, s, attn_mask=torch.ones(shape, dtype=torch.bool)).shape == v.shape
