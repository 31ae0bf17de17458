"""Swin of transformers: its windows are shifted in every other block, and their mask of -100 hides truly."""

from collections import Counter

import pytest
import torch
from transformers import SwinConfig, SwinModel

from attention_modules.hosts.base import AttentionSwapError
from attention_modules.swap import swap_attention

SIZES = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}


@pytest.mark.parametrize("mechanism", ["softmax", "uniform", "sigmoid", "forgetting", "ssmax", "rpc"])
def test_what_a_shifted_window_hides_changes_nothing(mechanism):
    torch.manual_seed(0)
    model = SwinModel(SwinConfig(**SIZES)).eval().double()
    image = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    plain = model(image).last_hidden_state
    swap_attention(model, mechanism)
    if mechanism == "softmax":
        torch.testing.assert_close(model(image).last_hidden_state, plain)
    model.double()
    block = model.encoder.layers[0].blocks[1]
    mask = block.get_attn_mask(8, 8, dtype=torch.float64, device="cpu")
    tokens = torch.randn(4, 16, 16, dtype=torch.float64)
    changed = tokens.where(mask[3, 0].ge(0).unsqueeze(-1), torch.randn(4, 16, 16, dtype=torch.float64))
    out, other = (block.attention(x, mask)[0][3, 0] for x in (tokens, changed))
    assert (mask[3, 0] < 0).any()
    torch.testing.assert_close(other, out, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mechanism", ["softmax", "sigmoid"])
def test_hooks_on_every_part_fire_as_often_as_in_the_plain_model(mechanism):
    calls = []
    for swap in (False, True):
        torch.manual_seed(0)
        model, seen = SwinModel(SwinConfig(**SIZES)).eval(), Counter()
        for name, part in model.named_modules():
            part.register_forward_hook(lambda *_, name=name, seen=seen: seen.update([name]))
        if swap:
            swap_attention(model, mechanism)
        model(torch.randn(1, 3, 16, 16))
        calls.append(seen)
    assert calls[0]["encoder.layers.0.blocks.1.attention.relative_position_bias"] == 1
    assert calls[1] == calls[0]


@pytest.mark.parametrize("mechanism", ["value_residual", "neutreno", "elliptical"])
def test_windows_of_other_pixels_share_no_values(mechanism):
    model = SwinModel(SwinConfig(**SIZES))
    with pytest.raises(AttentionSwapError, match="its windows are shifted from block to block"):
        swap_attention(model, mechanism)
