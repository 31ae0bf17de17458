"""The kernels of flash-linear-attention and our operator, on the same numbers and in one run."""

from __future__ import annotations

import pytest
import torch

from attention_modules.mechanisms.linear import fla
from attention_modules.mechanisms.linear.operator import linear_operator
from tests.attention_modules.mechanisms.linear.test_operator import GATES, both, sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_both_are_as_near_to_float64(kind, dtype, device, monkeypatch, record_property):
    pytest.importorskip("fla", reason="needs the extra [fla]")
    if device.type != "cuda":
        pytest.skip("the kernels need a GPU")
    given = {name: x.to(device, dtype) for name, x in sample(kind, 1000, width=64, values=64).items()}
    if "log_decay" in given:
        given["log_decay"] = given["log_decay"].float()
    exact = both(linear_operator, {name: x.double() for name, x in given.items()})
    far = {}
    for who, installed in (("kernels", True), ("ours", False)):
        monkeypatch.setattr(fla, "installed", lambda installed=installed: installed)
        found = both(linear_operator, given)
        far[who] = max(float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items())
        record_property(who, f"{far[who]:.1e}")
    assert far["kernels"] <= (2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert far["ours"] <= (1e-2 if dtype == torch.bfloat16 else 2e-3)
