"""Host × mechanism × mode: the mechanism is called, once a swapped layer, and gives finite output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts.base import AttentionSwapError
from attention_modules.mechanism import AttentionMechanism
from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.cases import HOSTS, MECHANISMS, built, padding_mask

MODES = ("train", "eval", "no_grad", "inference_mode", "autocast", "padding")
CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def count_calls(model: nn.Module) -> list[str]:
    """A list that grows by one at each call of a mechanism.

    Not by hooks: nn.TransformerEncoderLayer leaves its fused path where any module below it has one.
    """
    calls: list[str] = []

    def counted(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(name)
            return forward(*args, **kwargs)

        return call

    for name, module in model.named_modules():
        if isinstance(module, AttentionMechanism):
            module.forward = counted(name, module.forward)
    return calls


@pytest.mark.parametrize("mode", [*MODES, pytest.param("compile", marks=pytest.mark.costly)])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("host", HOSTS)
def test_mechanism_is_called(host: str, mechanism: str, mode: str) -> None:
    case, model = HOSTS[host], built(host)
    name, options = MECHANISMS[mechanism]
    if mode == "padding" and not case.padding:
        pytest.skip("images have no padding")
    if mechanism in case.refuses:
        before = {key: id(value) for key, value in model.named_parameters()}
        with pytest.raises(AttentionSwapError, match=case.refuses[mechanism]):
            swap_attention(model, name, **options)
        assert {key: id(value) for key, value in model.named_parameters()} == before
        return
    report = swap_attention(model, name, **options)
    assert len(report) == case.layers
    calls = count_calls(model)
    padding = padding_mask() if mode == "padding" else None
    if mode == "train":
        out = case.run(model.train(), padding)
        out.square().sum().backward()
        unused = [key for key, value in model.named_parameters() if value.grad is None]
        assert not [key for key in unused if "pooler" not in key]
    elif mode == "compile":
        expected = case.run(model, padding)
        calls.clear()
        for row in report:  # the layers alone: a fifth of the time that whole models take
            model.get_submodule(row.name).compile(backend="aot_eager")
        out = case.run(model, padding)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    else:
        with CONTEXTS.get(mode, contextlib.nullcontext)():
            out = case.run(model, padding)
    assert len(calls) == case.layers
    assert torch.isfinite(out).all()


GPT2 = pytest.param(
    "gpt2", marks=pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 cannot compile the whole GPT-2")
)


@pytest.mark.parametrize("host", ["timm-vit", "encoder", GPT2])
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


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("host", HOSTS)
def test_softmax_for_softmax_changes_nothing(host: str, grad: bool, padded: bool) -> None:
    case, model = HOSTS[host], built(host)
    if padded and not case.padding:
        pytest.skip("images have no padding")
    padding = padding_mask() if padded else None
    keep = ~padding_mask() if padded else slice(None)
    with torch.set_grad_enabled(grad):
        plain = case.run(model, padding)
        swap_attention(model, "softmax")
        torch.testing.assert_close(case.run(model, padding)[keep], plain[keep], atol=1e-5, rtol=1e-5)
        restore_attention(model)
        assert torch.equal(case.run(model, padding)[keep], plain[keep])


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("host", HOSTS)
def test_restore_is_bit_identical(host: str, mechanism: str) -> None:
    case, model = HOSTS[host], built(host)
    if mechanism in case.refuses:
        pytest.skip("refused, as the table test shows")
    name, options = MECHANISMS[mechanism]
    plain, kinds = case.run(model, None), [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    swap_attention(model, name, **options)
    assert len(restore_attention(model)) == case.layers
    assert torch.equal(case.run(model, None), plain)
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
