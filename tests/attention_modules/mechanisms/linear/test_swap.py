"""Linear-time mechanisms in models: what sees the future refuses those that cannot, before anything changes."""

import pytest
import torch
from torch import nn

from attention_modules import (
    AttentionSpec,
    AttentionSwapError,
    SelfAttention,
    build_mechanism,
    swap_attention,
)
from attention_modules.naive import naive_recurrence
from attnswap import attention_maps
from tests.attention_modules.compare import random_heads

ALWAYS = ("gla", "delta", "gated_delta", "kda")


def vit():
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=3)


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=40, **sizes))


def own():
    return SelfAttention(24, 2)


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("build", [vit, bert, own])
def test_an_encoder_refuses_what_must_hide_the_future(build, name):
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        AttentionSwapError,
        match=r"sees the future, and \w+Attention writes one .*retention, performer, or hedgehog without a window",
    ):
        swap_attention(model, name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["linear", "retention"])
def test_an_encoder_takes_what_has_a_form_for_it(name):
    model = vit().eval()
    swap_attention(model, name)
    out = model(torch.randn(2, 3, 32, 32))
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ALWAYS)
def test_where_only_a_call_tells_it_is_refused_by_name(name):
    layer = nn.MultiheadAttention(24, 2, batch_first=True)
    swap_attention(layer, name)
    x = torch.randn(2, 7, 24)
    with pytest.raises(ValueError, match=rf"{name} attention writes one token after the other .*is_causal=True"):
        layer(x, x, x)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert layer(x, x, x, attn_mask=mask)[0].isfinite().all()


def test_maps_are_the_implied_weights_of_the_recurrence():
    """By the identity as values; those of delta rules may be negative."""
    layer = SelfAttention(24, 2, "gated_delta", is_causal=True).double().eval()
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        (found,) = attention_maps(layer, x).values()
        q, k, v = (part.unflatten(-1, (2, 12)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
        q, k, _, *gates = layer.mechanism.tensors(q, k, v, x)
        implied, _ = naive_recurrence(q, k, torch.eye(9, dtype=torch.float64).expand(1, 2, 9, 9), *gates)
    torch.testing.assert_close(found, implied, atol=1e-12, rtol=0)
    assert (found < 0).any()


@pytest.mark.parametrize("name", ["linear", "retention"])
def test_a_state_needs_causality(name):
    mechanism = build_mechanism(name, AttentionSpec(24, 3, 8))
    with pytest.raises(ValueError, match=f"{name} attention takes a state only where it hides the future"):
        mechanism(**random_heads(), state={})


def test_a_state_of_another_shape_or_kind_is_refused_by_name():
    mechanism = build_mechanism("linear", AttentionSpec(24, 3, 8)).double()
    for state, message in (
        ({"S": torch.zeros(2, 3, 8, 8)}, "initial_state must be"),
        ({"z": torch.zeros(1)}, "has a state"),
    ):
        with pytest.raises(ValueError, match=message):
            mechanism(**random_heads(), is_causal=True, state=state)
