"""Every host with a swapped layer in every precision, restored, and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from attention_modules import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import HOSTS, MECHANISMS, built, padding_mask
from tests.attention_modules.hosts.placed import Placed
from tests.gpu.measures import PRECISIONS, distance

SWAPS = ("symmetric", "sigmoid")  # without a query, and with one


def output_and_gradients(model, run, padding):
    """By name, on the CPU in float64; those of what gets no gradient are left out."""
    out = run(model, padding)
    wide = out if out.dtype == torch.float64 else out.float()
    wide.sin().sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return {name: each.detach().cpu().double() for name, each in {"output": out, **found}.items()}


def distances(found, exact):
    """Of the output, and of the farthest gradient over the norm of the largest."""
    assert found.keys() == exact.keys()
    slopes = exact.keys() - {"output"}
    largest = max(exact[name].norm() for name in slopes)
    far = torch.stack([(found[name] - exact[name]).norm() / largest for name in slopes])
    return {"output": distance(found["output"], exact["output"]), "gradient": float(far.max())}  # NaN stays NaN


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mechanism", SWAPS)
@pytest.mark.parametrize("host", HOSTS)
def test_swapped_and_restored(host, mechanism, precision, device, record_property):
    case, (name, options), at = HOSTS[host], MECHANISMS[mechanism], PRECISIONS[precision]
    padding = padding_mask() if case.padding else None
    model = Placed(built(host).to(device, at.dtype), device, at.dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        first = case.run(model, padding)
    if mechanism in case.refuses:
        with pytest.raises(AttentionSwapError, match=case.refuses[mechanism]):
            swap_attention(model, name, **options)
    else:
        swap_attention(model, name, **options)
        wide = Placed(copy.deepcopy(model.model).to("cpu", torch.float64), torch.device("cpu"), torch.float64)
        exact = output_and_gradients(wide, case.run, padding)
        with at.active(device):
            found = output_and_gradients(model, case.run, padding)
        far = distances(found, exact)
        for kind, error in far.items():
            record_property(kind, f"{error:.1e}")
        assert far["output"] <= at.output
        assert far["gradient"] <= at.gradient
        restore_attention(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) and after[key].device.type == device.type for key in before)
    with torch.no_grad():
        assert torch.equal(case.run(model, padding), first)


@pytest.mark.parametrize("host", [host for host, case in HOSTS.items() if "symmetric" not in case.refuses])
def test_compiled(host, device, record_property):
    case, padding = HOSTS[host], padding_mask() if HOSTS[host].padding else None
    model = Placed(built(host).to(device), device)
    swap_attention(model, "symmetric")
    eager = output_and_gradients(model, case.run, padding)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")
    found = output_and_gradients(compiled, case.run, padding)
    torch.compiler.reset()
    assert counters["stats"]["unique_graphs"] > 0
    far = distances({name.removeprefix("_orig_mod."): each for name, each in found.items()}, eager)
    record_property("largest", f"{max(far.values()):.1e}")
    assert all(each <= 1e-3 for each in far.values())
