"""Layers of a class whose projections are declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attention_modules import AttentionSwapError, SelfAttention, declare_host, restore_attention, swap_attention
from attention_modules.analysis import attention_maps, layer_lipschitz_bound
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
    own.SequenceFirst: {"qkv": "c_attn", "heads": "n_head"},
}
KV: dict[str, Any] = {"q": "to_q", "kv": "to_kv", "heads": "heads"}


def turned(base: type[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """As the class takes it, or gives it."""
    return x.transpose(0, 1) if base is own.SequenceFirst else x


@pytest.mark.parametrize(
    ("kind", "linear"),
    [(own.Causal, "c_attn, c_proj"), (own.Grouped, "q_proj, o_proj, kv_proj")],
    ids=["joint", "separate"],
)
def test_what_is_not_declared_names_what_could_be(kind: type[nn.Module], linear: str) -> None:
    with pytest.raises(AttentionSwapError, match=rf"or q= with kv=, or with k= and v=, .* \(it has {linear}\)"):
        swap_attention(kind(), "symmetric")


@pytest.mark.parametrize("base", NAMES)
@pytest.mark.parametrize("mechanism", ["symmetric", "rpc"])
def test_without_a_query_it_is_what_our_own_layer_gives(base: type[nn.Module], mechanism: str) -> None:
    torch.manual_seed(0)
    layer, x = declared(base, **NAMES[base])().double(), features().double()
    expected = layer(turned(base, x))
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
    out = turned(base, layer(turned(base, x)))
    torch.testing.assert_close(out, ours(x, is_causal=found.spec.is_causal), atol=1e-12, rtol=1e-12)
    out.sum().backward()
    assert all(value.grad is not None for value in layer.parameters())
    assert restore_attention(layer) == [""]
    assert torch.equal(layer(turned(base, x)), expected)
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
        ({"qkv": "c_attn", "heads": 2}, r"does not fit: what c_attn gives in 2 heads .*\(q has another shape"),
        ({"qkv": "c_attn", "heads": "c_proj"}, "must be an integer of at least 1"),
        ({"qkv": "c_attn", "heads": 4, "out": "c_prj"}, "has no 'c_prj'.* Did you mean 'c_proj'"),
        ({"qkv": "c_attn", "heads": 4, "query_norm": "q_norm"}, "has no 'q_norm', which its declaration names"),
    ],
)
def test_a_declaration_that_does_not_fit(names: dict[str, Any], text: str) -> None:
    model = nn.Sequential(declared(own.Joint, **names)())
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "symmetric")
    assert not hasattr(model[0], "mechanism")


class KeysFirst(nn.Module):
    """Another order, and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.kqv = nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, q, v = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.kqv(x).chunk(3, 2))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("example", [torch.zeros(1, 6, 16), torch.zeros(0, 6, 16), torch.full((1, 6, 16), torch.nan)])
def test_an_example_without_values_checks_nothing(example: torch.Tensor) -> None:
    model = nn.Sequential(declared(KeysFirst, qkv="kqv", heads=4)())
    with pytest.raises(AttentionSwapError, match=r"does not fit: what kqv gives .*q differs"):
        swap_attention(model, "symmetric", example=example)


def test_what_runs_on_such_an_example_alone_cannot_be_checked() -> None:
    class Needs(KeysFirst):
        def forward(self, x: torch.Tensor, rope: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + rope.view(6, 16)

    zeros = torch.zeros(1, 6, 16)
    with pytest.raises(AttentionSwapError, match="gives it nothing but zeros, or numbers that are not finite"):
        swap_attention(declared(Needs, qkv="kqv", heads=4)(), "sink", example=(zeros, zeros[0], zeros[0, 0]))


def test_a_declaration_is_checked_without_values() -> None:
    kind = declared(own.ByHead, qkv="query_key_value", heads="heads")
    twin = kind()
    with torch.device("meta"):
        layer, wrong = kind(), declared(KeysFirst, qkv="kqv", heads=4)()
    for each in (layer, twin):
        swap_attention(each, "symmetric")
    layer.load_state_dict(twin.state_dict(), assign=True)
    assert torch.equal(layer(features()), twin(features()))
    with pytest.raises(AttentionSwapError, match="does not fit"):
        swap_attention(wrong, "symmetric")


class Gated(nn.Module):
    """Its joint projection holds a gate too."""

    def __init__(self) -> None:
        super().__init__()
        self.braid = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, q, k, v = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.braid(x).chunk(4, 2))
        return (nn.functional.scaled_dot_product_attention(q, k, v) * gate.sigmoid()).transpose(1, 2).flatten(2)


class Handwritten(Gated):
    """And its softmax is its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, q, k, v = self.braid(x).unsqueeze(1).chunk(4, -1)
        return (torch.softmax(q @ k.mT, -1) @ v).squeeze(1)


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (Gated, r"has another shape\).*and nothing else, such as a gate .*register_host"),
        (Handwritten, r"cannot be checked, as it writes its softmax itself \(.*test_declared.py:\d+\)"),
    ],
)
def test_a_class_that_cannot_be_declared(base: type[nn.Module], text: str) -> None:
    model = nn.Sequential(declared(base, qkv="braid", heads=4)())
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "symmetric")


class Scaled(own.Joint):
    """It multiplies queries and keys itself, and tells the call so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = nn.functional.scaled_dot_product_attention(q * 0.25, k * 0.5, v, scale=3.0)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Convolved(nn.Module):
    """Its projection is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.braid = nn.Conv1d(16, 48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.braid(x).unflatten(1, (3, 4, 4)).transpose(-1, -2).unbind(1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(-1, -2).flatten(1, 2)


@pytest.mark.parametrize(
    ("base", "path", "text"),
    [
        (
            Scaled,
            "c_attn",
            r"\(q is 0.25 times as long, k is 0.5 times as long, v differs by 0 .*\); leave the factor to the call "
            r"\(scale=0.375\)",
        ),
        (Convolved, "braid", "is no linear layer, but a Conv1d: .*leave the class undeclared.*register_host"),
    ],
)
def test_a_declaration_that_does_not_fit_says_what_to_do(base: type[nn.Module], path: str, text: str) -> None:
    model = nn.Sequential(declared(base, qkv=path, heads=4)())
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "symmetric")


def test_one_head_without_a_dimension() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.braid = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(*self.braid(x).chunk(3, -1))

    layer = declared(One, qkv="braid", heads=1)()
    _, k, v = layer.braid(features()).chunk(3, -1)
    swap_attention(layer, "symmetric")
    torch.testing.assert_close(layer(features()), nn.functional.scaled_dot_product_attention(k, k, v))


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
        (nn.Module, {"qkv": "a"}, TypeError),
        (nn.Linear, {"qkv": "weight"}, TypeError),
        (own.Joint, {"qkv": 3}, TypeError),
        (own.Joint, {"qkv": ""}, TypeError),
        *((own.Joint, {"qkv": "c_attn", "heads": heads}, TypeError) for heads in (0, -1, True, 4.0, float("nan"), "")),
        (own.Joint, {"qkv": "c_attn", "kv_heads": 2.0}, TypeError),
        (own.Joint, {"qkv": "c_attn", "causal": "yes"}, TypeError),
        (own.Joint, {"qkv": "c_attn", "out": nn.Linear(2, 2)}, TypeError),
        (own.Joint, {"qkv": "c_attn", "query_norm": 3}, TypeError),
    ],
)
def test_what_is_no_declaration(kind: Any, names: dict[str, Any], error: type[Exception]) -> None:
    hosts = loaded_hosts()
    with pytest.raises(error):
        declare_host(kind, **{"heads": 4, **names})
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


X, MEMORY = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
OTHERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[torch.Tensor, ...]]] = {
    "sequence-first": (own.SequenceFirst, NAMES[own.SequenceFirst], (X.transpose(0, 1),)),
    "as many samples as tokens": (own.SequenceFirst, NAMES[own.SequenceFirst], (torch.randn(6, 6, 16),)),
    "memory": (own.WithMemory, KV, (X, MEMORY)),
    "memory as long": (own.WithMemory, KV, (X, MEMORY[:, :6])),
    "memory first": (own.MemoryFirst, KV, (MEMORY, X)),
    "three inputs": (
        own.Three,
        {**dict(zip("qkv", "qkv", strict=True)), "heads": 4},
        (X.transpose(0, 1), torch.randn(9, 2, 12), torch.randn(9, 2, 10)),
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_softmax_for_softmax_in_other_layouts_and_of_other_inputs(case: str) -> None:
    torch.manual_seed(0)
    base, names, given = OTHERS[case]
    layer = declared(base, **names)()
    inputs = [x.clone().requires_grad_() for x in given]

    def passed() -> list[torch.Tensor]:
        out = layer(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])]

    before = passed()
    torch.compiler.reset()
    whole = torch.__version__ >= (2, 14)  # type: ignore[operator]  # that of 2.9 cannot look into Tensor.unflatten here
    for mechanism in ("softmax", "sink", "gated"):
        (row,) = swap_attention(layer, mechanism, where="", example=given)
        assert (row.host, row.dim, row.heads) == (f"declared {type(layer).plain_class.__name__}", 16, 4)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=whole)(*given), layer(*given))
        if mechanism == "softmax":
            torch.testing.assert_close(passed(), before, atol=1e-6, rtol=0)
        else:
            assert not torch.allclose(layer(*given), before[0], atol=1e-3)
            layer(*given).sum().backward()
            assert all(value.grad is not None for value in layer.mechanism.parameters())
        assert restore_attention(layer) == [""]
        assert all(map(torch.equal, passed(), before))


@pytest.mark.parametrize("case", [case for case in OTHERS if OTHERS[case][0] is not own.SequenceFirst])
def test_cross_attention_is_told_and_refuses_what_it_cannot_have(case: str) -> None:
    base, names, given = OTHERS[case]
    layer = declared(base, **names)()
    with pytest.raises(AttentionSwapError, match="the model has cross-attention only"):
        swap_attention(layer, "sink", example=given)
    refused = {"symmetric": "needs a query", "rpc": "needs a query", "value_residual": "values of other layers"}
    for mechanism, text in {**refused, "twicing": "no query for each key"}.items():
        with pytest.raises(AttentionSwapError, match=text):
            swap_attention(layer, mechanism, where="", example=given)
    assert not hasattr(layer, "mechanism")
    maps = attention_maps(layer, given, layers="")[""]
    q, k = (layer.to_q(X), layer.to_kv(given[given[0] is X])) if base is not own.Three else _first(layer, given)
    q, k = (x[..., :16].unflatten(2, (4, -1)).transpose(1, 2) for x in (q, k))
    torch.testing.assert_close(maps, (q @ k.mT / 2).softmax(-1), atol=1e-6, rtol=0)


def _first(layer: Any, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.q(given[0]).transpose(0, 1), layer.k(given[1]).transpose(0, 1)


def test_a_layer_that_takes_two_sequences_runs_alone() -> None:
    kind = declared(own.WithMemory, **KV)
    model = nn.Sequential(own.Joint(), kind(memory=12))
    report = swap_attention(model, "sink", where=["0", "1"])
    assert [(row.host, row.dim) for row in report][1] == (f"declared {kind.__name__}", 16)
    assert [layer.name for layer in attention_layers(model)] == ["0"]
    three = declared(own.Three, **OTHERS["three inputs"][1])
    with pytest.raises(AttentionSwapError, match="cannot be checked, as it does not run alone: pass example="):
        swap_attention(three(), "sink", where="")


@pytest.mark.parametrize("mechanism", ["symmetric", "twicing"])
def test_keys_from_elsewhere_are_no_surprise(mechanism: str) -> None:
    layer, x, other = declared(own.Context, **KV)(), X, torch.randn(2, 6, 16)
    swap_attention(layer, mechanism)
    assert layer(x).isfinite().all()
    assert torch.equal(layer(x, x), layer(x))
    for call in (lambda: layer(x, other), lambda: layer(x=x, context=other), lambda: layer(x, context=other)):
        with pytest.raises(NotImplementedError, match=r"was given a second sequence .* pass example= with both"):
            call()
    restore_attention(layer)
    with pytest.raises(AttentionSwapError, match="cross-attention"):
        swap_attention(layer, mechanism, where="", example=(x, other))
    swap_attention(layer, "sink", where="")
    assert not torch.equal(layer(x, other), layer(x))


@pytest.mark.parametrize(
    ("base", "names", "text"),
    [
        (own.Three, {"q": "q", "k": "k", "v": "k"}, r"v differs by"),
        (own.Three, {"q": "q", "k": "v", "v": "v"}, r"k differs by"),
        (own.Three, {"q": "q", "k": "v", "v": "k"}, r"does not fit: what q, v, k gives"),
        (own.WithMemory, {"q": "to_q", "k": "to_q", "v": "to_q"}, "does not fit"),
        (own.MemoryFirst, {"q": "to_kv", "kv": "to_kv"}, "does not fit"),
    ],
)
def test_each_projection_is_compared_with_its_own_input(base: type[nn.Module], names: Any, text: str) -> None:
    layer = declared(base, heads=4, **names)()
    if base is own.Three:
        layer.k = nn.Linear(10, 16)
        given = [torch.randn(6, 2, 16), torch.randn(9, 2, 10), torch.randn(9, 2, 10)]
    else:
        given = [X, X + 1]
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(layer, "sink", where="", example=given)
    assert not hasattr(layer, "mechanism")


def test_a_query_of_a_parameter_cannot_be_declared() -> None:
    class Latents(own.WithMemory):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 3, 16))

        def forward(self, memory: torch.Tensor) -> torch.Tensor:
            return super().forward(self.latents.expand(len(memory), -1, -1), memory)

    with pytest.raises(AttentionSwapError, match=r"its queries are made of none of its inputs \[B, N, C\] or"):
        swap_attention(declared(Latents, **KV)(), "sink", where="", example=MEMORY)


def test_sequence_first_maps_are_those_of_a_batch_first_layer() -> None:
    torch.manual_seed(0)
    first, joint = declared(own.SequenceFirst, **NAMES[own.SequenceFirst])(), own.Joint()
    joint.load_state_dict(first.state_dict())
    for mechanism in ("softmax", "entmax"):
        swap_attention(first, mechanism)
        swap_attention(joint, mechanism)
        maps = attention_maps(first, X.transpose(0, 1))[""]
        torch.testing.assert_close(maps, attention_maps(joint, X)[""])


class Asks(nn.Module):
    """Of Base; ``ask`` makes what asks the keys, ``beside`` what comes to the output, ``bias`` a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.temperature, self.shift = nn.Parameter(torch.ones(2, 1, 1)), nn.Parameter(torch.zeros(2, 1, 8))
        self.rel = nn.Parameter(torch.randn(6, 6, 8))

    def ask(self, q: torch.Tensor) -> torch.Tensor:
        return q

    beside = bias = lambda self, q: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        out = nn.functional.scaled_dot_product_attention(self.ask(q), k, v, attn_mask=self.bias(q))
        more = self.beside(q)
        return self.out((out if more is None else out + more).transpose(1, 2).flatten(2))


ELSEWHERE = "uses its queries elsewhere, too"


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"ask": lambda self, q: q * self.temperature}, "'temperature' acts on its queries alone"),
        ({"ask": lambda self, q: q + self.shift}, "'shift' acts on its queries alone"),
        ({"beside": lambda self, q: q}, ELSEWHERE),
        ({"bias": lambda self, q: torch.einsum("bhnd,nmd->bhnm", q, self.rel)}, ELSEWHERE),
    ],
    ids=["temperature", "bias", "residual", "relative positions"],
)
def test_a_query_that_does_more_is_not_left_out(members: dict[str, Any], text: str) -> None:
    kind = type("Does", (Asks,), members)
    declare_host(kind, qkv="qkv", heads=2)
    model = nn.Sequential(kind())
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "symmetric", example=torch.randn(2, 6, 16))
    swap_attention(model, "sink")
    plain = type("DoesNot", (Asks,), {})
    declare_host(plain, qkv="qkv", heads=2)
    layer = plain()
    nn.init.zeros_(layer.out.weight)
    swap_attention(nn.Sequential(layer), "symmetric")
