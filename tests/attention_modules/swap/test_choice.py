"""Which layers are chosen, what is refused, and what the report says."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import Skipped
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import AttentionMechanism, AttentionSpec
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import (
    AttentionSwapError,
    restore_attention,
    swap_attention,
)
from tests.attention_modules.swap.models import (
    ALL,
    DIM,
    HEADS,
    Noisy,
    NoisyWithoutQuery,
    OwnForward,
    Pyramid,
    SameForward,
    WindowAttention,
    mha,
    names,
    state_of,
)
from tests.rows import each_row


def test_a_module_or_a_callable_of_a_name_alone_is_refused():
    model = Pyramid()
    with pytest.raises(AttentionSwapError, match="got a MultiheadAttention itself: give its name"):
        swap_attention(model, "softmax", where=model.blocks[0].attn)
    cached = functools.lru_cache(lambda name: True)
    for choice in ({"where": lambda name: True}, {"exclude": lambda name: True}, {"where": cached}):
        with pytest.raises(AttentionSwapError, match="is called with a name and a module, which it refuses"):
            swap_attention(model, "softmax", **choice)

    def of_a_name(name):
        return True

    @functools.wraps(of_a_name)
    def adapted(name, module):
        return of_a_name(name)

    assert len(swap_attention(Pyramid(), "softmax", where=adapted)) == len(ALL)
    with pytest.raises(TypeError, match="AttentionMechanism itself computes nothing"):
        swap_attention(model, AttentionMechanism)
    assert all(layer.mechanism is None for layer in attention_layers(model))


@each_row(
    ("choice", "expected"),
    [
        ({}, ALL),
        ({"where": "blocks.1.*"}, ALL[1:2]),
        ({"where": ["blocks.0.attn", "blocks.2.attn"]}, [ALL[0], ALL[2]]),
        ({"where": lambda name, module: isinstance(module, nn.Module) and name.endswith("2.attn")}, ALL[2:]),
        ({"layers": 0}, ALL[:1]),
        ({"layers": [-1, 0, 2]}, [ALL[0], ALL[2]]),
        ({"where": "blocks.[12].*", "layers": [0]}, ALL[1:2]),
        ({"exclude": "*.1.attn"}, [ALL[0], ALL[2]]),
        ({"exclude": lambda name, module: "0" in name}, ALL[1:]),
        ({"layers": [0, 1], "exclude": ["blocks.0.attn"]}, ALL[1:2]),
    ],
)
def test_selection(choice: dict, expected: list[str]) -> None:
    model = Pyramid()
    assert names(swap_attention(model, "softmax", **choice)) == expected
    assert [layer.name for layer in attention_layers(model) if layer.mechanism is not None] == expected
    assert [layer.name for layer in attention_layers(Pyramid(), **choice)] == expected


@each_row(
    ("arguments", "text"),
    [
        ({"where": "blocks.9.attn"}, r"matches no module name.*Did you mean 'blocks\..\.attn'"),
        ({"where": "blocks.0.mlp"}, r"names 'blocks.0.mlp' \(Linear\), which is no attention layer"),
        ({"where": "head"}, r"unsupported host: attention pooling.*Known hosts: .*timm.*Hugging Face"),
        ({"where": ["blocks.0.attn", "nothing"]}, r"where='nothing' matches no module name"),
        ({"where": lambda name, module: False}, r"selects no self-attention layer; the model has: 'blocks.0.attn'"),
        ({"exclude": "blocks.7.attn"}, r"exclude='blocks.7.attn' matches no module name"),
        ({"exclude": "*"}, r"leaves none of the 3"),
        ({"layers": [3]}, r"3 is out of range, 3 self-attention layers match \(0 to 2"),
        ({"layers": [-4]}, r"-4 is out of range"),
        ({"layers": []}, r"layers is empty"),
        ({"layers": ["0"]}, r"takes integers, got \['0'\]; names and patterns go into where="),
        ({"where": [1]}, r"takes name patterns or a callable, got 1"),
        ({"mechanism": "sofmax"}, r"unknown attention mechanism 'sofmax'.*softmax"),
        ({"mechanism": Noisy, "fail_at": 2}, r"layer 2 refuses"),
    ],
)
def test_errors_name_the_value_and_change_nothing(arguments: dict, text: str) -> None:
    model = Pyramid()
    before, rng = state_of(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        swap_attention(model, **{"mechanism": Noisy, **arguments})
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_bad_options_change_nothing() -> None:
    model = Pyramid()
    before = state_of(model)
    with pytest.raises(TypeError, match=r"RPCAttention has no option 'iteration'.*Did you mean 'iterations'"):
        swap_attention(model, "rpc", iteration=3)
    assert state_of(model) == before


@each_row(
    ("model", "text"),
    [
        (
            nn.Linear(2, 2),
            "the model has no attention layer of a known host .*scaled_dot_product_attention.*register_host",
        ),
        (nn.Sequential(WindowAttention()), r"'0' \(WindowAttention\): no host .*WindowAttention.*register_host"),
        (nn.Sequential(OwnForward(DIM, HEADS)), "unsupported subclass: OwnForward .* forward of its own"),
    ],
)
def test_models_without_a_host(model: nn.Module, text: str) -> None:
    with pytest.raises(AttentionSwapError, match=text):
        swap_attention(model, "softmax")
    with pytest.raises(AttentionSwapError, match=text):
        attention_layers(model)


def test_a_failure_in_the_middle_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_modules.hosts.torch import MultiheadAttentionHost

    insert, model = MultiheadAttentionHost.insert, Pyramid()

    def failing(self: MultiheadAttentionHost, layer: nn.Module, mechanism: AttentionMechanism) -> None:
        insert(self, layer, mechanism)
        if mechanism.spec.layer_index == 1:
            raise MemoryError("no room")

    monkeypatch.setattr(MultiheadAttentionHost, "insert", failing)
    before, x = state_of(model), torch.randn(1, 3, DIM)
    plain = model(x)
    with pytest.raises(MemoryError):
        swap_attention(model, NoisyWithoutQuery)
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_subclass_that_changes_nothing_is_swapped_as_itself() -> None:
    model = nn.Sequential(SameForward(DIM, HEADS))
    swap_attention(model, "softmax")
    assert isinstance(model[0], SameForward)
    restore_attention(model)
    assert type(model[0]) is SameForward


def test_the_report_lists_what_was_and_what_was_not_swapped() -> None:
    model = Pyramid()
    layers = np.argsort([0.0, 1.0])  # integers of NumPy
    report = swap_attention(model, NoisyWithoutQuery, where="blocks.*", exclude="blocks.1.*", layers=layers)
    (row,) = report
    whole = sum(p.numel() for p in mha().parameters())
    assert (row.host, row.mechanism, row.dim, row.heads) == ("torch MultiheadAttention", "NoisyWithoutQuery", 8, 2)
    assert (row.before, row.after) == (whole, whole - DIM * DIM - DIM + 3)
    assert [(skipped.name, skipped.reason) for skipped in report.skipped] == [
        ("blocks.1.attn", "excluded"),
        ("blocks.2.attn", "not selected"),
        ("head", "attention pooling: its queries are no tokens of the sequence"),
    ]
    printed = str(report)
    for text in ("blocks.0.attn", "NoisyWithoutQuery", "288", "1 swapped", "not swapped (3):", "AttentionPool"):
        assert text in printed
    second = swap_attention(model, "softmax", where="blocks.*", layers=[2])
    assert second.skipped[0] == Skipped(
        "blocks.0.attn", "MultiheadAttention", "not selected: it keeps NoisyWithoutQuery"
    )


def test_cross_attention_is_skipped_unless_named() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=True), 2)
    report = swap_attention(model, "softmax", where="layers.*")
    assert names(report) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert [skipped.name for skipped in report.skipped] == ["layers.0.multihead_attn", "layers.1.multihead_attn"]
    assert all("cross-attention" in skipped.reason for skipped in report.skipped)
    restore_attention(model)
    x, memory = torch.randn(2, 3, DIM), torch.randn(2, 5, DIM)
    plain = model.eval()(x, memory)
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match="cross-attention needs a query, which NoisyWithoutQuery"):
        swap_attention(model, NoisyWithoutQuery, where=["*.multihead_attn", "*.self_attn"])
    assert state_of(model) == before
    assert names(swap_attention(model, "softmax", where="*.multihead_attn", exclude="layers.1.*")) == [
        "layers.0.multihead_attn"
    ]
    torch.testing.assert_close(model(x, memory), plain, atol=1e-5, rtol=1e-5)


def test_cross_attention_alone_says_how_to_name_it() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=True), 2)
    with pytest.raises(AttentionSwapError, match=r"cross-attention only .*layers.0.mul.*'\*\.multihead_attn'"):
        swap_attention(model, "softmax", where="*multihead_attn")
    alone = nn.MultiheadAttention(DIM, HEADS, kdim=4, vdim=4)
    with pytest.raises(AttentionSwapError, match=r"cross-attention only .'the model'.*where=''"):
        swap_attention(alone, "softmax")
    assert len(swap_attention(alone, "softmax", where="")) == 1


def test_other_peoples_cross_attention_is_known_by_its_name() -> None:
    model = nn.ModuleDict({"self_attn": mha(), "cross_attn": mha()})
    assert names(swap_attention(model, NoisyWithoutQuery)) == ["self_attn"]


def test_hosts_do_not_import_their_libraries() -> None:
    code = (
        "import sys, torch\n"
        "from attention_modules.hosts import attention_layers\n"
        "import attention_modules.swap\n"
        "assert len(attention_layers(torch.nn.MultiheadAttention(8, 2))) == 1\n"
        "print(*{'timm', 'transformers', 'peft', 'lightning'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_callable_and_its_spec() -> None:
    specs: list[AttentionSpec] = []

    def factory(spec: AttentionSpec) -> AttentionMechanism:
        specs.append(spec)
        return SoftmaxAttention(spec)

    swap_attention(Pyramid(), factory, layers=[1])
    assert specs == [AttentionSpec(DIM, HEADS, DIM // HEADS, layer_index=1)]


def test_layers_that_are_swapped_one_by_one_draw_other_values() -> None:
    model = Pyramid()
    swap_attention(model, "softmax")  # which draws none, and so changes none
    for layer in range(3):
        swap_attention(model, "gated", layers=[layer])
    for layer in range(3):  # again, where as many others are swapped each time
        swap_attention(model, "gated", layers=[layer])
    gates = [block.attn.mechanism.gate.weight for block in model.blocks]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(gates, 2))


@pytest.mark.parametrize(("layers", "other"), [(None, 0), ([1], 2)], ids=["twice", "of another layer"])
def test_a_callable_returns_a_mechanism_for_each_layer(layers: list[int] | None, other: int) -> None:
    model = Pyramid()
    swap_attention(model, Noisy, layers=[2])
    one = model.blocks[2].attn.mechanism.half()
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match=rf"cannot swap 'blocks\.1.*returned the Noisy of 'blocks\.{other}"):
        swap_attention(model, lambda spec: one, layers=layers)
    assert state_of(model) == before
    swap_attention(model, lambda spec: one, layers=[2])  # its own
    assert model.blocks[2].attn.mechanism is one


@each_row("argument", [{"layers": 0.5}, {"where": 1}, {"exclude": 5}])
def test_selectors_of_the_wrong_type_are_named(argument: dict) -> None:
    ((name, value),) = argument.items()
    with pytest.raises(AttentionSwapError, match=f"{name} takes .*got {value}"):
        swap_attention(nn.Sequential(SelfAttention(8, 2)), "rpc", **argument)


@pytest.mark.parametrize("call", [lambda model: swap_attention(model, "rpc"), restore_attention, attention_layers])
@pytest.mark.parametrize("model", ["resnet", Pyramid], ids=["name", "class"])
def test_something_else_than_a_module_is_refused(call, model) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module that is built, got .*; build it first"):
        call(model)
