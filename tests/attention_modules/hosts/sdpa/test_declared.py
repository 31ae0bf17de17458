"""Layers of a class whose projections are declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attention_modules import AttentionSwapError, SelfAttention, declare_host, restore_attention, swap_attention
from attention_modules.analysis import layer_lipschitz_bound
from attention_modules.hosts import attention_layers
from attention_modules.hosts.table import loaded_hosts, register_host
from attention_modules.stabilizers.sigma import linear_weights
from tests.attention_modules.hosts.cases import features
from tests.attention_modules.hosts.sdpa import own


def declared(base: type[nn.Module], **names: Any) -> type[nn.Module]:
    """A class of its own, so that no test sees what another declared."""
    kind = type(f"Declared{base.__name__}", (base,), {})
    declare_host(kind, **names)
    return kind


NAMES: dict[type[nn.Module], dict[str, Any]] = {
    own.Joint: {"qkv": "c_attn", "heads": "n_head"},
    own.Causal: {"qkv": "c_attn", "heads": "n_head"},
    own.ByHead: {"qkv": "query_key_value", "heads": "heads"},
    own.NanoAttention: {"qkv": "c_attn", "heads": "n_head"},
    own.Outer: {"qkv": "to_qkv", "heads": 4},
}


@pytest.mark.parametrize("base", NAMES)
@pytest.mark.parametrize("mechanism", ["symmetric", "rpc"])
def test_without_a_query_it_is_what_our_own_layer_gives(base: type[nn.Module], mechanism: str) -> None:
    torch.manual_seed(0)
    layer, x = declared(base, **NAMES[base])().double(), features().double()
    expected = layer(x)
    (found,) = attention_layers(layer)
    assert found.spec.is_causal is (base in (own.Causal, own.NanoAttention))
    ours = SelfAttention(16, 4, mechanism=mechanism, qkv_bias=base is not own.Outer).double()
    projection = layer.get_submodule(NAMES[base]["qkv"])
    width = slice(None) if base is not own.ByHead else None
    with torch.no_grad():
        for name in ("weight", "bias"):
            value = getattr(projection, name)
            if value is None:
                continue
            rows = (
                value.unflatten(0, (3, -1)) if width else value.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(1, 2)
            )
            getattr(ours.qkv, name).copy_(rows[1:].flatten(0, 1))
        out = getattr(layer, "c_proj", None)
        ours.proj.weight.copy_(torch.eye(16) if out is None else out.weight)
        ours.proj.bias.copy_(torch.zeros(16) if out is None else out.bias)
    report = swap_attention(layer, mechanism)
    assert report[0].before - report[0].after == 16 * 16 + 16 * (base is not own.Outer)
    torch.testing.assert_close(layer(x), ours(x, is_causal=found.spec.is_causal), atol=1e-12, rtol=1e-12)
    layer(x).sum().backward()
    assert all(value.grad is not None for value in layer.parameters())
    assert restore_attention(layer) == [""]
    assert torch.equal(layer(x), expected)
    assert type(layer.get_submodule(NAMES[base]["qkv"])) is nn.Linear


def test_rope_and_grouped_keys() -> None:
    kind = declared(own.Grouped, q="q_proj", kv="kv_proj", heads="heads", kv_heads="kv_heads")
    (layer,) = attention_layers(nn.Sequential(kind()))
    assert layer.spectrum_caveat is not None
    assert "rotary" in layer.spectrum_caveat
    assert [weight.shape for weight in layer.qk_weights()] == [torch.Size([4, 4, 16])] * 2
    for mechanism, text in (("symmetric", "grouped keys"), ("qk_norm", "rotary positions")):
        with pytest.raises(AttentionSwapError, match=text):
            swap_attention(nn.Sequential(kind()), mechanism)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"qkv": "c_attn", "heads": "n_heads"}, "has no 'n_heads', which its declaration names. Did you mean 'n_head'"),
        ({"qkv": "c_att", "heads": 4}, "has no 'c_att'.* Did you mean 'c_attn'"),
        ({"qkv": "n_head", "heads": 4}, "n_head is no linear layer, but a int"),
        ({"qkv": "c_attn", "heads": 2}, r"does not fit: what c_attn gives in 2 heads .*\(q by inf"),
        ({"qkv": "c_attn", "heads": "c_proj"}, "must be an integer of at least 1"),
        ({"qkv": "c_attn", "heads": 0}, "must be an integer of at least 1"),
    ],
)
def test_a_declaration_that_does_not_fit(names: dict[str, Any], text: str) -> None:
    model = nn.Sequential(declared(own.Joint, **names)())
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "symmetric")
    assert not hasattr(model[0], "mechanism")


def test_adapters_are_refused_where_the_query_is_dropped() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(own.DeclaredJoint())
    swap_attention(model, "symmetric")
    with pytest.raises(ValueError, match="its mechanism uses no query"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn", "c_proj"]))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert {name.split(".")[3] for name, _ in adapted.named_parameters() if "lora" in name} == {"c_proj"}
    assert adapted(features()).isfinite().all()


def test_sigma_reparam_takes_every_weight() -> None:
    model = nn.Sequential(own.DeclaredJoint())
    names = [(id(module), name) for module, name in linear_weights(model)]
    swap_attention(model, "symmetric")
    assert [(id(module), name) for module, name in linear_weights(model)] == names


@pytest.mark.parametrize("kv_heads", [None, 1, 3, 4, 8])
def test_a_wrong_number_of_key_heads(kv_heads: int | None) -> None:
    kind = declared(own.Grouped, q="q_proj", kv="kv_proj", heads="heads", kv_heads=kv_heads)
    with pytest.raises(AttentionSwapError, match=r"does not fit: what q_proj, kv_proj gives in 4 heads .*kv_heads="):
        swap_attention(nn.Sequential(kind()), "sink")


@pytest.mark.parametrize(
    ("kind", "names", "error"),
    [
        ("no.such.Class", {"qkv": "a"}, ValueError),
        ("torch.nn.functional.relu", {"qkv": "a"}, TypeError),
        (own.Joint, {}, TypeError),
        (own.Joint, {"qkv": "a", "q": "b"}, TypeError),
        (own.Joint, {"q": "b", "k": "c"}, TypeError),
    ],
)
def test_what_is_no_declaration(kind: Any, names: dict[str, str], error: type[Exception]) -> None:
    hosts = loaded_hosts()
    with pytest.raises(error):
        declare_host(kind, heads=4, **names)
    assert loaded_hosts() == hosts
    with pytest.raises(TypeError, match="expected a host"):
        register_host("timm")  # type: ignore[arg-type]


def test_the_bound_reads_a_declared_layer() -> None:
    torch.manual_seed(0)
    (layer,) = attention_layers(own.DeclaredJoint())
    ours = SelfAttention(16, 4, qkv_bias=True)
    ours.qkv.load_state_dict(layer.module.c_attn.state_dict())
    ours.proj.load_state_dict(layer.module.c_proj.state_dict())
    (own_layer,) = attention_layers(ours)
    bounds = [layer_lipschitz_bound(each, radius=2.0, num_tokens=6) for each in (layer, own_layer)]
    assert bounds[0] == bounds[1]
