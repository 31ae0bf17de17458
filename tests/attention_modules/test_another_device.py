"""What an accelerator asks for, tried on the CPU: no float64 where there is none, one device, and no waiting for it."""

from __future__ import annotations

import pytest
import torch

from attention_modules import analysis, swap_attention
from attention_modules.base import AttentionSpec
from attention_modules.testing import Subject
from tests.another_device import AnotherDevice, WaitsForDeviceError
from tests.attention_modules.hosts.cases import HOSTS, MECHANISMS, built, padding_mask
from tests.attention_modules.hosts.placed import Placed

TOKENS = 9
DEVICES = {"mps": (False, True), "cuda": (True, False)}  # whether it has float64, and may be read from
SPEC = AttentionSpec(16, 2, 8)


def another(kind: str) -> AnotherDevice:
    float64, may_wait = DEVICES[kind]
    return AnotherDevice(kind, float64=float64, may_wait=may_wait)


def masks():
    seen = torch.arange(TOKENS).expand(2, 1, 1, -1) < TOKENS - 2
    return {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": seen},
        "additive": {"attn_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e9)},
    }


def assert_near(found, expected):
    """Equal up to float32's rounding of the largest number of each tensor; None beside None is equal too."""
    assert [each is None for each in found] == [each is None for each in expected]
    scales = [None if each is None else each.detach().abs().max().clamp(min=1.0) for each in expected]
    parts = ([None if s is None else x / s for x, s in zip(each, scales, strict=True)] for each in (found, expected))
    torch.testing.assert_close(*parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", MECHANISMS)
def test_mechanisms_stay_on_the_device_in_its_dtypes_and_never_wait(case):
    name, options = MECHANISMS[case]
    subject = Subject(name, SPEC, options)
    module, inputs = subject.build(TOKENS), subject.inputs(TOKENS)
    wanted = [*inputs.values(), *module.parameters()]
    weights = torch.linspace(-1, 1, inputs["v"].numel()).view(inputs["v"].shape)
    for mask, given in masks().items():
        if mask == "causal" and not module.row_masks:
            continue
        expected = module(**inputs, **given)
        slopes = torch.autograd.grad((expected * weights).sum(), wanted, allow_unused=True)
        for kind in DEVICES:
            with another(kind):
                found = module(**inputs, **given)
                gradients = torch.autograd.grad((found * weights).sum(), wanted, allow_unused=True)
                assert found.device.type == kind
                assert found.dtype == torch.float32
            assert_near((found, *gradients), (expected, *slopes))


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_stay_on_the_device_in_its_dtypes(host):
    case = HOSTS[host]
    mechanism = "sigmoid" if "symmetric" in case.refuses else "symmetric"
    model = built(host)
    swap_attention(model, MECHANISMS[mechanism][0])
    expected = case.run(model, padding_mask() if case.padding else None)
    wanted = list(model.parameters())
    slopes = torch.autograd.grad(expected.sin().sum(), wanted, allow_unused=True)
    with another("mps"):
        padding = padding_mask() if case.padding else None  # made here it lies on the host
        found = case.run(Placed(model, torch.device("mps")), padding)
        gradients = torch.autograd.grad(found.sin().sum(), wanted, allow_unused=True)
        assert found.device.type == "mps"
        assert found.dtype == torch.float32
    assert_near((found, *gradients), (expected, *slopes))


def statistics():
    q, k = torch.randn(2, 2, 3, TOKENS, 8).unbind(0)
    w_q, w_k = torch.randn(2, 2, 8, 16).unbind(0)
    given = masks()
    return {
        **{
            f"statistics, {mask}": lambda mask=mask: analysis.attention_statistics(q, k, **given[mask])
            for mask in given
        },
        "sink": lambda: {"": analysis.attention_sink(q, k, max_rows=4)},
        "similarity": lambda: {"": analysis.token_similarity(q[:, 0])},
        "largest logit": lambda: {"": analysis.largest_logit(q, k)},
        "spectrum": lambda: analysis.qk_statistics(w_q, w_k),
        "Lipschitz": lambda: {
            "": analysis.local_lipschitz(torch.tanh, q[:, 0], generator=torch.Generator()).value,
        },
    }


READ = ("statistics, additive", "Lipschitz")  # in steps that a monitor logs, and outside training


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", statistics())
def test_statistics_too(name, kind):
    compute = statistics()[name]
    expected = compute()
    if kind == "cuda" and name in READ:
        with another(kind), pytest.raises(WaitsForDeviceError):
            compute()
        return
    with another(kind):
        found = compute()
        assert {each.dtype for each in found.values()} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
