"""Host × mechanism × mode: the mechanism is called, once a swapped layer, and gives finite output."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.mechanism import AttentionMechanism, available_mechanisms, mechanism_class
from attention_modules.sharing import stacks
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import (
    BETWEEN_LAYERS,
    HOSTS,
    MECHANISMS,
    Run,
    built,
    deep,
    padding_mask,
    subject,
)
from tests.rows import pairwise

MODES = ("eval", "no_grad", "inference_mode", "autocast", "padding", "train")
CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def count_calls(model: nn.Module) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """A list that grows by one at each call of a mechanism: its name, the values and the keywords that it is given."""
    calls: list[tuple[str, Tensor, dict[str, Any]]] = []

    def counted(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((name, v, kwargs))
            return forward(q, k, v, *args, **kwargs)

        return call

    for name, module in model.named_modules():
        if isinstance(module, AttentionMechanism):
            module.forward = counted(name, module.forward)
    return calls


def as_it_is(model: nn.Module) -> tuple[list[type], list[tuple[str, int]], list[str]]:
    """What a refused swap must leave: classes, Parameters and keys."""
    parameters = [(key, id(value)) for key, value in model.named_parameters()]
    return [type(module) for module in model.modules()], parameters, list(model.state_dict())


def check_refused(model: nn.Module, mechanism: str, text: str) -> None:
    """The swap is an error by name that leaves the model as it was."""
    before = as_it_is(model)
    name, options = MECHANISMS[mechanism]
    with pytest.raises(ValueError, match=text):
        swap_attention(model, name, **options)
    assert as_it_is(model) == before


def check_mode(model: nn.Module, run: Run, calls: list[Any], mode: str) -> None:
    """The mechanism is called once a layer, with finite output, and in training every Parameter gets a gradient."""
    calls.clear()
    padding = padding_mask() if mode == "padding" else None
    with CONTEXTS.get(mode, contextlib.nullcontext)():
        out = run(model.train(mode == "train"), padding)
    assert len(calls) == sum(isinstance(module, AttentionMechanism) for module in model.modules()), mode
    assert torch.isfinite(out).all(), mode
    if mode == "train":
        out.square().sum().backward()
        unused = [key for key, value in model.named_parameters() if value.grad is None]
        assert not [key for key in unused if "pooler" not in key]


def test_every_registered_mechanism_is_in_the_table() -> None:
    """Those of other packages, and of other tests, are theirs."""
    own = {name for name in available_mechanisms() if mechanism_class(name).__module__.startswith("attention_modules.")}
    assert own == {name for name, _ in MECHANISMS.values()}


def _accepted(host: str, mechanism: str, mode: str) -> bool:
    return mechanism not in HOSTS[host].refuses and (HOSTS[host].padding or mode != "padding")


CALLED = pairwise(HOSTS, MECHANISMS, MODES, allowed=_accepted)


@pytest.mark.parametrize("host", HOSTS)
def test_mechanism_is_called(host: str, subtests: pytest.Subtests) -> None:
    """Each in some mode, and restored bitwise."""
    for _, mechanism, mode in (row for row in CALLED if row[0] == host):
        with subtests.test(mechanism=mechanism, mode=mode):
            check_called(host, mechanism, mode)


@pytest.mark.parametrize("host", [host for host, case in HOSTS.items() if case.refuses])
def test_what_a_host_refuses_leaves_it_as_it_was(host: str, subtests: pytest.Subtests) -> None:
    for mechanism, text in HOSTS[host].refuses.items():
        with subtests.test(mechanism=mechanism):
            check_refused(subject(host, mechanism)[0], mechanism, text)


def check_called(host: str, mechanism: str, mode: str) -> None:
    case, (model, run) = HOSTS[host], subject(host, mechanism)
    plain, before = run(model, None), as_it_is(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    name, options = MECHANISMS[mechanism]
    report = swap_attention(model, name, **options)
    assert len(report) == case.layers or mechanism in BETWEEN_LAYERS
    calls = count_calls(model)
    if mechanism in case.refuses_call:
        with pytest.raises((ValueError, RuntimeError), match=case.refuses_call[mechanism]):
            check_mode(model, run, calls, mode)
    else:
        check_mode(model, run, calls, mode)
    assert len(restore_attention(model)) == len(report)
    assert torch.equal(run(model.eval(), None), plain)
    assert as_it_is(model)[::2] == before[::2]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("host", HOSTS)
def test_layers_read_the_values_of_others(host: str, subtests: pytest.Subtests) -> None:
    """The very values of the layer that the mechanism names, the first of a stack none; alone a layer refuses."""
    for mechanism in set(BETWEEN_LAYERS) - set(HOSTS[host].refuses):
        with subtests.test(mechanism=mechanism):
            check_values_of_others(host, mechanism)


def check_values_of_others(host: str, mechanism: str) -> None:
    case = HOSTS[host]
    if case.deep is not case.build:
        check_refused(built(host), mechanism, "only one of its stack")
    model, run = deep(host)
    swap_attention(model, MECHANISMS[mechanism][0])
    calls = count_calls(model)
    run(model, padding_mask() if case.padding else None)
    (need,) = mechanism_class(mechanism).needs
    stack_of = {name: stack for stack, names in stacks([name for name, *_ in calls]).items() for name in names}
    values: dict[str, list[Tensor]] = {}
    for name, v, given in calls:
        earlier = values.setdefault(stack_of[name], [])
        if earlier:
            assert given[need] is earlier[0 if need == "first_value" else -1]
        else:
            assert given[need] is None
        earlier.append(v)
    assert {len(given) for given in values.values()} == {2}


CAUSAL = ("llama-grouped",)  # where the neutral hedgehog, which has a window, may be


@pytest.mark.parametrize("mechanism", [name for name, (kind, _) in MECHANISMS.items() if mechanism_class(kind).neutral])
@pytest.mark.parametrize("host", ["llama-grouped", "timm-rope-grouped"])
def test_a_neutral_start_is_softmax_over_grouped_keys_too(host: str, mechanism: str) -> None:
    """Where heads share keys, what a mechanism learns of each head is still of the query's heads."""
    if mechanism in HOSTS[host].refuses or (mechanism == "hedgehog" and host not in CAUSAL):
        pytest.skip("refused, as the table test shows")
    (name, options), (model, run) = MECHANISMS[mechanism], subject(host, mechanism)
    expected = run(model, None)
    swap_attention(model, name, **{**options, **(mechanism_class(name).neutral or {})})
    torch.testing.assert_close(run(model, None), expected, atol=1e-5, rtol=1e-4)


def _compiled() -> list[Any]:
    """One without a query or softmax in every host, in one those that need more, the rest among the slow tests."""
    found = []
    for host, case in HOSTS.items():
        for mechanism in MECHANISMS:
            if mechanism not in case.refuses and mechanism not in case.refuses_call:
                needs = mechanism_class(MECHANISMS[mechanism][0]).needs
                often = mechanism == ("softmax" if "symmetric" in case.refuses else "symmetric")
                often = often or (host == "timm-attention" and bool(needs or mechanism == "softmax"))
                found.append(pytest.param(host, mechanism, marks=() if often else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("host", "mechanism"), _compiled())
def test_mechanism_compiles(host: str, mechanism: str) -> None:
    model, run = subject(host, mechanism)
    name, options = MECHANISMS[mechanism]
    report = swap_attention(model, name, **options)
    calls = count_calls(model)
    expected = run(model, None)
    calls.clear()
    for row in report:  # the layers alone: a fifth of the time that whole models take
        model.get_submodule(row.name).compile(backend="aot_eager")
    out = run(model, None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert len(calls) == len(report)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("host", ["timm-vit", "encoder", "gpt2"])
def test_whole_model_compiles(host: str) -> None:
    case, model = HOSTS[host], built(host)
    swap_attention(model, "softmax")
    calls = count_calls(model)
    with torch.no_grad():  # where nn.TransformerEncoderLayer would take its fused path
        expected = case.run(model, None)
        calls.clear()
        out = case.run(torch.compile(model, backend="aot_eager"), None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert len(calls) == case.layers


@pytest.mark.parametrize("host", HOSTS)
def test_softmax_for_softmax_changes_nothing(host: str) -> None:
    case, model = HOSTS[host], built(host)
    for grad, padded in itertools.product((True, False), (True, False) if case.padding else (False,)):
        padding = padding_mask() if padded else None
        keep = ~padding_mask() if padded else slice(None)
        with torch.set_grad_enabled(grad):
            plain = case.run(model, padding)
            swap_attention(model, "softmax")
            torch.testing.assert_close(case.run(model, padding)[keep], plain[keep], atol=1e-5, rtol=1e-5)
            restore_attention(model)
            assert torch.equal(case.run(model, padding)[keep], plain[keep])
