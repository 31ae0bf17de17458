"""Mechanisms against released layers: stored values in float64, and the layers of timm and transformers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attention_modules import AttentionSpec, SelfAttention, build_mechanism, connect_layers
from attention_modules.mechanisms import entmax_attention, neutreno_attention, sink_attention
from tests.attention_modules.compare import random_heads

CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def golden(mechanism: str, case: int) -> dict[str, Tensor]:
    path = Path(os.environ.get("ATTNSWAP_DATA", "")) / ".." / "golden" / "mechanisms_released.npz"
    if "ATTNSWAP_DATA" not in os.environ or not path.is_file():
        pytest.skip("ATTNSWAP_DATA/../golden/mechanisms_released.npz is not there")
    with np.load(path) as file:
        prefix = f"{mechanism}/case{case}/"
        return {n.removeprefix(prefix): torch.from_numpy(file[n]) for n in file.files if n.startswith(prefix)}


def layer(arrays: dict[str, Tensor], mechanism: str, prefix: str = "") -> SelfAttention:
    names = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    built = SelfAttention(arrays["x"].shape[-1], int(arrays["heads"]), mechanism, qkv_bias=True).double()
    built.load_state_dict({name: arrays[prefix + name] for name in names})
    return built


def causal(tokens: int) -> Tensor:
    """An additive mask that hides the future."""
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return torch.zeros(1, 1, tokens, tokens, dtype=torch.float64).masked_fill(~past, -torch.inf)


def assert_as_released(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    x = arrays["x"].requires_grad_()
    y = module(x)
    (gradient,) = torch.autograd.grad((y * arrays["grad_out"]).sum(), x)
    torch.testing.assert_close(y, arrays["y"], **CLOSE)
    torch.testing.assert_close(gradient, arrays["grad_x"], **CLOSE)


@pytest.mark.parametrize("case", [0, 1])
def test_twicing(case):
    arrays = golden("twicing", case)
    assert_as_released(layer(arrays, "twicing"), arrays)


@pytest.mark.parametrize("case", [0, 1])
def test_elliptical_over_two_layers(case):
    arrays = golden("elliptical", case)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(arrays, "elliptical", f"layer{index}.") for index in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x) + x)

    model = Two()
    connect_layers(model)
    assert_as_released(model, arrays)


@pytest.mark.parametrize("case", [0, 1])
def test_neutreno(case):
    arrays = golden("neutreno", case)
    found = neutreno_attention(*(arrays[name] for name in ("q", "k", "v", "v0")), alpha=0.6)
    torch.testing.assert_close(found, arrays["y"], **CLOSE)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("own", [None, 3])
def test_differential_as_timm(own, depth, is_causal):
    """The depth is that of what was loaded, wherever the layer stands now."""
    timm = pytest.importorskip("timm.layers.diff_attention")
    torch.manual_seed(0)
    released = timm.DiffAttention(24, 3, qkv_bias=True, depth=depth).double()
    ours = SelfAttention(24, 3, "differential", qkv_bias=True, layer_index=own).double()
    state = {f"mechanism.{name}" if "lambda" in name else name: x for name, x in released.state_dict().items()}
    state["mechanism.norm.weight"] = state.pop("sub_norm.weight").normal_()
    state["mechanism.depth"] = torch.tensor(depth)
    ours.load_state_dict(state)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    expected = released(x, is_causal=is_causal)  # its λ is of float32
    torch.testing.assert_close(ours(x, is_causal=is_causal), expected, atol=1e-6, rtol=1e-6)


def test_differential_of_heads_as_transformers():
    modeling = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = modeling.DiffLlamaConfig(
        hidden_size=32,
        rms_norm_eps=1e-6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    released = modeling.DiffLlamaAttention(config, layer_idx=2).double().eval()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    angles = torch.randn(2, 5, 8, dtype=torch.float64)
    rotary = (angles.cos(), angles.sin())
    mask = causal(5)
    expected = released(x, position_embeddings=rotary, attention_mask=mask)[0]
    q, k, v = (
        projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for projection in (released.q_proj, released.k_proj, released.v_proj)
    )
    q, k = modeling.apply_rotary_pos_emb(q, k, *rotary)
    ours = build_mechanism("differential", AttentionSpec(32, 4, 8, layer_index=2), pairs="heads", eps=1e-6).double()
    state = {name: x for name, x in released.state_dict().items() if "lambda" in name}
    ours.load_state_dict(state | {"depth": torch.tensor(released.layer_idx)})
    out = ours(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    found = released.o_proj(out)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("alpha", "name"), [(1.5, "entmax15"), (2.0, "sparsemax")])
def test_entmax_as_its_package(alpha, name):
    package = pytest.importorskip("entmax")
    heads = {name: x.requires_grad_() for name, x in random_heads().items()}
    q, k, v = heads.values()
    released = getattr(package, name)(q @ k.mT * 8**-0.5, dim=-1) @ v
    ours = entmax_attention(q, k, v, alpha)
    torch.testing.assert_close(ours, released, **CLOSE)
    gradients = (torch.autograd.grad(out.square().sum(), list(heads.values())) for out in (ours, released))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_sink_as_gpt_oss():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    heads = {name: x.requires_grad_() for name, x in random_heads().items()}
    sinks = torch.randn(3, dtype=torch.float64).requires_grad_()
    module = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
    mask = causal(9)
    released, _ = modeling.eager_attention_forward(module, *heads.values(), mask, scaling=8**-0.5)
    ours = sink_attention(*heads.values(), sinks, is_causal=True)
    torch.testing.assert_close(ours, released.transpose(1, 2), **CLOSE)
    given = [*heads.values(), sinks]
    for found, expected in zip(
        torch.autograd.grad(ours.square().sum(), given),
        torch.autograd.grad(released.square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **CLOSE)
