"""Numbers of the released implementations, in float64."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_modules import SelfAttention
from tests.attention_modules.compare import assert_same


def golden(name: str) -> list[tuple[dict, dict[str, torch.Tensor]]]:
    path = Path(os.environ.get("ATTNSWAP_DATA", "")) / ".." / "golden" / f"{name}.npz"
    if "ATTNSWAP_DATA" not in os.environ or not path.is_file():
        pytest.skip(f"ATTNSWAP_DATA/../golden/{name}.npz is not there")
    with np.load(path) as file:
        cases = json.loads(str(file["meta"]))
        return [
            (meta, {n.split(".", 1)[1]: torch.from_numpy(file[n]) for n in file.files if n.startswith(f"{i}.")})
            for i, meta in enumerate(cases)
        ]


def run(layer: SelfAttention, arrays: dict[str, torch.Tensor], weights: dict[str, str]) -> dict[str, torch.Tensor]:
    """The output, and gradients of (y · w).sum() for x and whatever the file has gradients of."""
    layer.double().load_state_dict({name: arrays[key] for name, key in weights.items()})
    x = arrays["x"].requires_grad_()
    y = layer(x)
    (y * arrays["w"]).sum().backward()
    found = {"y": y.detach(), "grad_x": x.grad}
    for name, key in weights.items():
        if f"grad_{key}" in arrays:
            found[f"grad_{key}"] = layer.get_parameter(name).grad
    return found


def test_rpc_and_symmetric():
    weights = {"qkv.weight": "kv_weight", "qkv.bias": "kv_bias", "proj.weight": "proj_weight", "proj.bias": "proj_bias"}
    cases = golden("rpc_released")
    assert {meta["iterations"] for meta, _ in cases} >= {0, 1, 2, 4, 6}
    for meta, arrays in cases:
        options = {"iterations": meta["iterations"], "lam": meta["lam"]}
        name, options = ("rpc", options) if meta["iterations"] else ("symmetric", {})
        layer = SelfAttention(arrays["x"].shape[-1], meta["num_heads"], name, options, qkv_bias=True)
        found = run(layer, arrays, weights)
        assert_same(found, {key: arrays[key] for key in ("y", "grad_x", "grad_kv_weight")}, 1e-9)


def test_scaled():
    weights = {
        "qkv.weight": "qkv_weight",
        "qkv.bias": "qkv_bias",
        "proj.weight": "proj_weight",
        "proj.bias": "proj_bias",
    }
    cases = golden("scaled_released")
    assert {meta["kind"] for meta, _ in cases} == {"scaled_matrix", "scaled_scalar"}
    for meta, arrays in cases:
        options = {"variant": meta["kind"].removeprefix("scaled_")}
        _, tokens, dim = arrays["x"].shape
        layer = SelfAttention(dim, meta["num_heads"], "scaled", options, qkv_bias=True, num_tokens=tokens)
        found = run(layer, arrays, {**weights, "mechanism.s": "s"})
        assert_same(found, {key: arrays[key] for key in ("y", "grad_x", "grad_s")}, 1e-9)
