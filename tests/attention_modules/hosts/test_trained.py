"""An optimizer that was built before a swap: it says so at its first step, and nobody else is bothered."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from attention_modules.hosts import trained
from attention_modules.swap import restore_attention, swap_attention
from tests.rows import each_row

DIM, HEADS = 8, 2


def network() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(DIM, 3))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4, DIM)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _nothing_left_over():
    gc.collect()
    trained._made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: SGD(parameters, lr=0.1),
        lambda parameters: Adam(parameters, fused=True),
        lambda parameters: AdamW(parameters, foreach=True),
    ],
    ids=["sgd", "fused", "foreach"],
)
def test_the_first_step_of_an_older_optimizer_is_refused(build: Callable) -> None:
    model = network()
    optimizer = build(model.parameters())
    step(model, optimizer)
    report = swap_attention(model, "symmetric")
    assert "4 Parameters are new: build the optimizer after the swap" in str(report)
    assert report.new[0] == "0.layers.0.self_attn.in_proj_weight"
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"4 Parameters \(0\.layers\.0\.self_attn\.in_proj_weight and 3 more\)"):
            step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    del optimizer
    step(model, build(model.parameters()))
    step(model, build(model.parameters()))
    assert not trained._made


def test_parameters_listed_before_the_swap_are_refused_too() -> None:
    model = network()
    listed = list(model.parameters())
    swap_attention(model, "rpc")
    with pytest.raises(RuntimeError, match="and build the optimizer then"):
        step(model, SGD(listed, lr=0.1))


def test_restoring_and_swapping_again_replace_too() -> None:
    model = network()
    first = SGD(model.parameters(), lr=0.1)
    swap_attention(model, "symmetric")
    second = SGD(model.parameters(), lr=0.1)
    step(model, second)
    swap_attention(model, "rpc")  # keys and values stay the same objects
    step(model, second)
    restore_attention(model)
    for optimizer in (first, second):
        with pytest.raises(RuntimeError, match=r"in_proj_weight"):
            step(model, optimizer)
    step(model, SGD(model.parameters(), lr=0.1))


def test_a_query_that_is_taken_out_whole_and_put_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=DIM
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    tokens = torch.arange(4)[None]

    def train(optimizer: torch.optim.Optimizer) -> None:
        model(tokens).last_hidden_state.sum().backward()
        optimizer.step()

    optimizer = SGD(model.parameters(), lr=0.1)
    report = swap_attention(model, "symmetric")
    assert report.new == ()
    train(optimizer)  # keys and values are the same objects: nothing stands in the query's place
    restore_attention(model)
    with pytest.raises(RuntimeError, match=r"attention\.self\.query\.weight"):
        train(optimizer)


def test_a_mechanism_with_a_query_changes_no_parameter() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert swap_attention(model, "softmax").new == ()
    step(model, optimizer)


def test_parts_that_are_frozen_left_out_or_held_by_another() -> None:
    model = network()
    model[0].requires_grad_(False)
    head = SGD(model[1].parameters(), lr=0.1)
    swap_attention(model, "symmetric")
    step(model, head)  # a frozen body, and an optimizer of the head alone
    model = network()
    early = SGD(model[1].parameters(), lr=0.1)
    swap_attention(model, "scaled", num_tokens=4)
    step(model, early)
    step(model, early)  # it trains no swapped layer: what it leaves out is left out on purpose
    frozen = network().requires_grad_(False)
    optimizer = SGD(frozen.parameters(), lr=0.1)
    swap_attention(frozen, "symmetric")
    optimizer.step()


def test_two_optimizers_of_one_layer() -> None:
    model = network()
    swap_attention(model, "scaled", num_tokens=4)
    matrices = SGD([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    others = SGD([p for p in model.parameters() if p.dim() != 2], lr=0.1)
    for _ in range(3):
        step(model, matrices, others)
    assert not trained._made


def test_a_mechanisms_own_parameter_that_no_optimizer_holds_is_a_warning() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    report = swap_attention(model, "scaled", num_tokens=4)
    step(model, optimizer)
    with pytest.warns(UserWarning, match=rf"no optimizer holds {len(report.new)} new Parameters .*mechanism"):
        step(model, optimizer)
    step(model, optimizer)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    swap_attention(model, "scaled", num_tokens=4)
    for layer in model[0].layers:
        layer.self_attn.mechanism.requires_grad_(False)
    for _ in range(3):
        step(model, optimizer)


def test_a_parameter_group_that_was_added_is_enough() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    report = swap_attention(model, "symmetric")
    optimizer.add_param_group({"params": [model.get_parameter(name) for name in report.new]})
    step(model, optimizer)


@each_row("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_train(clone: Callable) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    swap_attention(model, "symmetric")
    twin = clone(model)
    step(twin, SGD(twin.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="built before"):
        step(model, optimizer)


def test_nothing_is_held_alive_and_a_failed_swap_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    swap_attention(model, "symmetric")
    assert trained._made
    del model, optimizer
    gc.collect()
    assert all(made.forgotten() for made in trained._made)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("attention_modules.swap._settle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swap_attention(model, "symmetric")
    step(model, optimizer)


def test_compiled_steps_are_checked() -> None:
    model = network()
    old = SGD(model.parameters(), lr=0.1)
    swap_attention(model, "symmetric")
    model(torch.randn(2, 4, DIM)).sum().backward()
    with pytest.raises(RuntimeError, match="built before"):
        torch.compile(old.step, backend="eager")()
    torch.compile(SGD(model.parameters(), lr=0.1).step, backend="eager")()
