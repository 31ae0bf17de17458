import pytest
import torch

from attention_modules import AttentionSpec
from attention_modules.analysis import projection_loss
from attention_modules.analysis.statistics import attention_row_sums
from attention_modules.masks import combine_masks, hide, tokens_of, visible
from attention_modules.mechanism import build_mechanism
from tests.rows import each_row


def tokens(n: int = 4, m: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3, n, 8), torch.zeros(2, 3, m or n, 8)


@each_row("shape", [(5, 4), (4, 5), (3, 1, 1, 4), (1, 2, 4, 4), (1, 1, 1, 1, 4), (3,)])
def test_a_mask_of_the_wrong_shape_is_an_error_that_names_both_shapes(shape):
    with pytest.raises(ValueError, match=r"does not broadcast to .* \(2, 3, 4, 4\)") as error:
        combine_masks(torch.ones(shape, dtype=torch.bool), False, *tokens())
    assert str(tuple(shape)) in str(error.value)


def test_an_integer_mask_is_an_error_that_names_the_cure():
    with pytest.raises(TypeError, match=r"int64.*\.bool\(\)"):
        combine_masks(torch.ones(4, 4, dtype=torch.int64), False, *tokens())


def test_causality_needs_as_many_queries_as_keys():
    with pytest.raises(ValueError, match="1 and 4"):
        combine_masks(None, True, *tokens(1, 4))


@pytest.mark.parametrize("boolean", [True, False])
def test_causality_is_folded_into_a_mask(boolean):
    seen = torch.tensor([True, False, True, True]).expand(1, 1, 1, 4)
    mask = seen if boolean else torch.zeros(1, 1, 1, 4).masked_fill(~seen, -torch.inf)
    combined, is_causal = combine_masks(mask, True, *tokens())
    assert not is_causal
    assert torch.equal(visible(combined), (seen & torch.ones(4, 4, dtype=torch.bool).tril()))


@pytest.mark.parametrize(
    "low", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4, torch.tensor(-1e4).bfloat16().item()]
)
def test_every_way_to_hide_becomes_minus_infinity(low):
    mask = torch.tensor([0.5, low, -3.0])
    assert hide(mask).tolist() == [0.5, -torch.inf, -3.0]
    assert visible(mask).tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5])
def test_causality_with_a_scale_that_is_not_positive_is_a_mask(scale):
    combined, is_causal = combine_masks(None, True, *tokens(), scale)
    assert not is_causal
    assert torch.equal(combined, torch.ones(1, 1, 4, 4, dtype=torch.bool).tril())
    assert combine_masks(None, True, *tokens(), 0.5) == (None, True)


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4, -1e3])
def test_mechanisms_and_statistics_agree_on_what_is_hidden(low):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=generator)
    mask = torch.zeros(5, 5)
    mask[1:, 3] = low
    mask[2] = low  # sees nothing where low hides
    shown = visible(mask)
    out = build_mechanism("symmetric", AttentionSpec(8, 2, 4))(q, k, v, mask)
    rows = attention_row_sums(q, k, attn_mask=mask, statistics=["entropy", "normalised_entropy"])
    assert (out[:, :, 2] == 0).all() == (not shown[2].any())
    assert rows["entropy"][1].eq(shown.any(-1).sum()).all()
    assert projection_loss(q, k, v, attn_mask=mask).h.allclose(v.double().square().sum(-1)[..., shown.any(-1)].mean(-1))


def test_a_nan_in_a_mask_hides_nothing():
    mask = torch.tensor([0.0, torch.nan])
    assert visible(mask).tolist() == [True, True]
    assert hide(mask).isnan().tolist() == [False, True]


PAST = torch.ones(4, 4, dtype=torch.bool).tril()
THERE = torch.tensor([False, True, False, True])  # hidden before the others, and between them
TRIANGLES = {
    "as it is": PAST & THERE,
    "rows of hidden tokens see everything": torch.where(THERE[:, None], PAST & THERE, True),
    "rows of hidden tokens see nothing": PAST & THERE & THERE[:, None],
}


@each_row(("case", "low"), [(case, low) for case in TRIANGLES for low in (None, -torch.inf, -1e4)])
def test_a_triangle_with_padding_says_which_tokens_are_there(case, low):
    mask = TRIANGLES[case]
    mask = mask if low is None else torch.zeros(4, 4).masked_fill(~mask, low)
    there, is_causal = tokens_of("gla", mask, False, *tokens())
    assert is_causal
    assert there.tolist() == [[THERE.tolist()]]


def test_padding_is_padding_and_causality_is_what_the_call_says():
    for mask in (THERE, THERE[None], THERE.expand(4, 4)):
        there, is_causal = tokens_of("linear", mask, False, *tokens())
        assert not is_causal
        assert there.tolist() == [[THERE.tolist()]]
    assert tokens_of("linear", None, True, *tokens()) == (None, True)


@each_row("count", [0, 1])
def test_a_first_token_alone_is_seen_with_a_future_and_without(count):
    """Of a causal mask with padding behind, where no sample has more: no model that hides the future ends in it."""
    mask = PAST & (torch.arange(4) < count)
    there, is_causal = tokens_of("gla", mask, False, *tokens())
    assert is_causal
    assert there.tolist() == [[mask[-1].tolist()]]


def test_padding_may_see_nothing():
    there, is_causal = tokens_of("linear", THERE & THERE[:, None], False, *tokens())
    assert not is_causal
    assert there.tolist() == [[THERE.tolist()]]


OTHERS = {
    "a sliding window": PAST.triu(-1),
    "packed sequences": torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool() & PAST,
    "a prefix that sees itself": PAST | (torch.arange(4) < 2),
}


@each_row("case", OTHERS)
def test_other_rows_are_refused_by_name(case):
    with pytest.raises(ValueError, match=r"gla attention .*masks of padding and causality alone.* \(1, 1, 4, 4\)"):
        tokens_of("gla", OTHERS[case], False, *tokens())


def test_a_bias_is_refused_where_there_are_no_logits():
    with pytest.raises(ValueError, match="gla attention has no logits"):
        tokens_of("gla", torch.tensor([0.0, 0.5, 0.0, -torch.inf]), True, *tokens())
