"""Attention maps and their rollout against the equations."""

import pytest
import torch

from attention_modules.analysis import attention_map, attention_rollout


@pytest.mark.parametrize("masked", [None, "boolean", "additive"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_the_map(masked, is_causal):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    seen = torch.rand(2, 1, 5, 5) > 0.4
    seen[0, 0, 2] = False  # a row that sees nothing
    bias = torch.randn(5, 5)
    given = {None: None, "boolean": seen, "additive": bias}[masked]
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k) * 0.3
    if masked == "boolean":
        logits = logits.masked_fill(~seen, -torch.inf)
    if masked == "additive":
        logits = logits + bias
    if is_causal:
        logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = logits.exp()
    expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    arguments = {"attn_mask": given, "is_causal": is_causal, "scale": 0.3}
    torch.testing.assert_close(attention_map(q, k, **arguments), expected)
    some = torch.tensor([4, 1, 2])
    torch.testing.assert_close(attention_map(q, k, **arguments, rows=some), expected[:, :, some])


def test_nan_stays_nan_and_rows_that_see_nothing_are_zeros():
    q, k = torch.randn(2, 1, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    q[..., 1, :] = torch.nan
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[2] = False
    found = attention_map(q, k, attn_mask=seen)[0, 0]
    assert found[1].isnan().all()
    assert (found[2] == 0).all()
    assert found[[0, 3]].sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_rollout_follows_the_tokens_through_the_layers():
    swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    first = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # both tokens look at the first
    eye = torch.eye(2)
    expected = 0.5 * (swap[0] + eye) @ (0.5 * (first[0] + eye))
    torch.testing.assert_close(attention_rollout([first, swap])[0], expected)
    assert not torch.equal(attention_rollout([first, swap]), attention_rollout([swap, first]))
    torch.testing.assert_close(attention_rollout([first, swap]).sum(-1), torch.ones(1, 2))


def test_rollout_refuses_maps_of_other_shapes():
    with pytest.raises(ValueError, match=r"\(1, 2, 3\)"):
        attention_rollout([torch.ones(1, 2, 3)])
    with pytest.raises(ValueError, match="square maps"):
        attention_rollout([torch.ones(1, 2, 2), torch.ones(1, 3, 3)])
