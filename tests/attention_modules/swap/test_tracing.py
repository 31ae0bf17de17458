"""torch.fx takes a swapped layer as a leaf, torch.jit.trace runs it, and torch.jit.script refuses it by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

from attention_modules.layers import SelfAttention
from attention_modules.sharing import SharedValueError
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import ALWAYS_CAUSAL, BETWEEN_LAYERS, MECHANISMS
from tests.rows import each_row


def vit(**options: object) -> nn.Module:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3, **options).eval()
    for block in model.blocks:
        block.attn.fused_attn = False  # before torch 2.9, fx cannot trace a fused plain layer
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def leaves(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]


@each_row(
    "name",
    [name for name in MECHANISMS if name not in (*BETWEEN_LAYERS, *ALWAYS_CAUSAL, "differential, pairs='heads'")],
)
def test_swapped_layers_are_leaves(name: str) -> None:
    mechanism, options = MECHANISMS[name]
    model = vit()
    swap_attention(model, mechanism, layers=[1], **options)
    graph = fx.symbolic_trace(model)
    assert "blocks.1.attn" in leaves(graph)
    assert "blocks.0.attn.qkv" in leaves(graph)
    torch.testing.assert_close(graph(images()), model(images()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "blocks.1.attn" in leaves(fx.symbolic_trace(twin))
    restore_attention(model)
    assert "blocks.1.attn.qkv" in leaves(fx.symbolic_trace(model))


def test_other_hosts_and_extractors() -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = pytest.importorskip("torchvision").models.VisionTransformer(32, 16, 2, 2, 16, 32).eval()
    swap_attention(model, "gated")
    name = "encoder.layers.encoder_layer_1.self_attention"
    out = extraction.create_feature_extractor(model, {name: "out"})(images())["out"][0]
    assert out.shape == (2, 5, 16)
    own = vit(attn_layer=SelfAttention.configured("softmax"))
    for _ in range(2):
        assert "blocks.0.attn" in leaves(fx.symbolic_trace(own))
        swap_attention(own, "sink")
        assert "blocks.0.attn" in leaves(fx.symbolic_trace(own))
        restore_attention(own)


def test_timm_extracts_by_names_of_layers() -> None:
    extract = pytest.importorskip("timm.utils").AttentionExtract
    model = vit()
    swap_attention(model, "rpc")
    found = extract(model, names=["blocks.*.attn"])(images())
    assert {name: tuple(out.shape) for name, out in found.items()} == {
        f"blocks.{index}.attn": (2, 5, 192) for index in range(2)
    }


def test_values_between_layers_are_missed_by_name() -> None:
    model = vit()
    swap_attention(model, "neutreno")
    with pytest.raises(SharedValueError, match="call the model itself"):
        fx.symbolic_trace(model)(images())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mechanism", ["softmax", "rpc", "retention", "gated_delta"])
def test_a_causal_encoder_is_traced(mechanism: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    swap_attention(model, mechanism)
    inputs = torch.randn(2, 6, 16), nn.Transformer.generate_square_subsequent_mask(6)
    expected = model(*inputs)
    for grads in torch.enable_grad(), torch.no_grad():
        with grads:
            torch.testing.assert_close(torch.jit.trace(model, inputs)(*inputs), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_script_is_refused_and_trace_is_not() -> None:
    model = vit()
    swap_attention(model, "gated", layers=[1])
    with pytest.raises(AttentionSwapError, match=r"torch.jit.script\(\) cannot compile .*GatedAttention.*jit.trace"):
        torch.jit.script(model)
    traced = torch.jit.trace(model, images())
    torch.testing.assert_close(traced(images()), model(images()))
    restore_attention(model)
    torch.jit.script(model)
