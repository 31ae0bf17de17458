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
from tests.rows import each_row, pairwise

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


@each_row(
    ("name", "change"),
    [
        ("linear", {"S": lambda x: x[..., 1:]}),
        ("gla", {"S": lambda x: x[:1]}),
        ("retention", {"S": lambda x: x.long()}),
        ("performer", {"top": lambda x: x[:1]}),
        ("performer", {"top": lambda x: None}),
        ("hedgehog", {"S": lambda x: x[:, :1]}),
        ("window", {"keys": lambda x: x[:, :, 1:]}),
        ("window", {"values": lambda x: x[:1]}),
        ("window", {"first_keys": lambda x: None}),
        ("window", {"count": lambda x: x.float()}),
    ],
)
def test_a_state_of_another_batch_or_kind_is_refused_by_name(name, change):
    mechanism, state = build_mechanism(name, AttentionSpec(24, 3, 8)), {}
    given = {of: x.float() for of, x in random_heads(shape=(2, 3, 7, 8)).items()}
    mechanism(**given, x=torch.randn(2, 7, 24), is_causal=True, state=state)
    ((of, changed),) = change.items()
    with pytest.raises(ValueError, match=rf"{name} attention continues from a state whose '{of}' is \("):
        mechanism(**given, x=torch.randn(2, 7, 24), is_causal=True, state=state | {of: changed(state[of])})


@each_row(("name", "output"), pairwise(("retention", "gla", "delta", "gated_delta", "kda"), ("norm", "gated")))
def test_what_float16_cannot_hold_is_normalized_before_it_is_rounded(name, output):
    mechanism = build_mechanism(name, AttentionSpec(24, 3, 8), output=output).half()
    q, k, v = (200 * torch.randn(3, 1, 3, 100, 8, generator=torch.Generator().manual_seed(0))).half()
    x = torch.randn(1, 100, 24, generator=torch.Generator().manual_seed(1)).half()
    found = mechanism(q, k, v, x=x, is_causal=True)
    exact = mechanism.double()(q.double(), k.double(), v.double(), x=x.double(), is_causal=True)
    assert found.dtype == torch.float16
    assert (found.double() - exact).norm() <= 1e-3 * exact.norm()
