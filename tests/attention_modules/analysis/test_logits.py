"""The largest logit against the whole map."""

import math

import pytest
import torch

from attention_modules.analysis import chunks, largest_logit, logit_bound
from attention_modules.stabilizers.naive import naive_logits


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask", ["none", "padding", "matrix", "additive"])
def test_equals_the_whole_map(mask, is_causal, monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    hidden = torch.rand(2, 1, 7, 7) > 0.6
    bias = 5 * torch.randn(1, 3, 7, 7)
    masks = {
        "none": (None, None),
        "padding": (~hidden[:, :, :1], ~hidden[:, :, :1]),
        "matrix": (~hidden[0, 0], ~hidden[0, 0]),
        "additive": (bias.masked_fill(hidden, -math.inf), ~hidden),  # what it adds is left out
    }
    given, seen = masks[mask]
    expected = naive_logits(q, k, seen, is_causal, 0.7).amax((-2, -1))
    found = largest_logit(q, k, attn_mask=given, is_causal=is_causal, scale=0.7)
    torch.testing.assert_close(found, expected)
    assert (logit_bound(q, k, 0.7) >= found - 1e-6).all()
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(largest_logit(q, k, attn_mask=given, is_causal=is_causal, scale=0.7), expected)


def test_a_hidden_nan_is_not_seen_and_a_visible_one_is():
    q = k = torch.ones(1, 2, 3, 4)
    k = k.index_fill(2, torch.tensor([2]), math.nan)
    padding = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    assert largest_logit(q, k, attn_mask=padding).tolist() == [[2.0, 2.0]]
    assert largest_logit(q, k).isnan().all()
    assert largest_logit(q, k, attn_mask=torch.zeros_like(padding)).isneginf().all()


def test_rows_that_do_not_count_are_left_out():
    q = torch.tensor([1.0, 9.0, 2.0]).view(1, 1, 3, 1)
    counting = torch.tensor([[True, False, True]])
    assert largest_logit(q, torch.ones(1, 1, 3, 1), counting=counting).item() == 2.0
    assert largest_logit(q, torch.ones(1, 1, 3, 1), counting=~counting & False).isneginf().all()


def test_half_precision_is_read_in_full():
    q = k = torch.full((1, 1, 2, 4), 200.0, dtype=torch.float16)  # their product overflows float16
    with torch.autocast("cpu", torch.bfloat16):
        assert largest_logit(q, k).item() == logit_bound(q, k).item() == 80_000.0
