"""Every mechanism in every precision: values and gradients beside its own float64 on the CPU, and compiled."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests.attention_modules.hosts.cases import MECHANISMS
from tests.gpu.measures import PRECISIONS, TOKENS, distance, limits, masks, run, subject


def placed(inputs, device, dtype):
    """The same numbers there, in another dtype, as leaves."""
    return {name: x.detach().to(device, dtype).requires_grad_() for name, x in inputs.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", MECHANISMS)
def test_near_its_float64(case, precision, device, record_property):
    at = PRECISIONS[precision]
    tested = subject(case)
    module = tested.build(TOKENS, at.dtype)
    inputs = tested.inputs(TOKENS, at.dtype)
    exact_module, exact_inputs = copy.deepcopy(module).double(), placed(inputs, "cpu", torch.float64)
    module, inputs = module.to(device), placed(inputs, device, at.dtype)
    allowed, failures = limits(case, precision), []
    far = dict.fromkeys(allowed, 0.0)
    for mask, given in masks(module, device, at.dtype).items():
        exact_given = {name: x.cpu() if torch.is_tensor(x) else x for name, x in given.items()}
        if mask == "additive":
            exact_given["attn_mask"] = exact_given["attn_mask"].double()
        exact = run(exact_module, exact_inputs, exact_given)
        with at.active(device):
            found = run(module, inputs, given, exact["weights"])
        assert found.keys() == exact.keys()
        for name in found.keys() - {"weights"}:
            kind = "output" if name == "output" else "gradient" if name in inputs else "parameter"
            error = distance(found[name], exact[name])
            far[kind] = max(far[kind], error)
            if not error <= allowed[kind]:
                failures.append(f"{name} under {mask}: {error:.2g}, limit {allowed[kind]:g}")
    for kind, error in far.items():
        record_property(kind, f"{error:.1e}")
    assert not failures, "; ".join(failures)
    assert all(map(math.isfinite, far.values()))


@pytest.mark.parametrize("case", MECHANISMS)
def test_compiled(case, device, record_property):
    tested = subject(case)
    module = tested.build(TOKENS).to(device)
    inputs = placed(tested.inputs(TOKENS), device, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="inductor" if device.type == "cuda" else "aot_eager")
    largest = 0.0
    for given in list(masks(module, device, torch.float32).values())[: 1 + module.row_masks]:
        eager = run(module, inputs, given)
        found = run(compiled, inputs, given, eager["weights"])
        assert found.keys() == eager.keys()
        far = [largest, *(distance(found[name], eager[name]) for name in eager)]
        largest = float(torch.tensor(far).max())  # NaN stays NaN
    record_property("largest", f"{largest:.1e}")
    torch.compiler.reset()
    assert largest <= 1e-3
