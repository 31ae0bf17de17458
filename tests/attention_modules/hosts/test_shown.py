"""The maps that swapped layers return are on the graph, with the gradients that the plain layers' maps have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attention_modules import swap_attention

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TOKENS = torch.arange(10).view(2, 5)


def hugging_face(kind: str, **more: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = SIZES if kind == "ViT" else {**SIZES, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
        config = getattr(transformers, f"{kind}Config")(**sizes, **more)
        return getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager").eval()

    return make


MODELS = {
    "vit": hugging_face("ViT", image_size=8, patch_size=4),
    "bert": hugging_face("Bert"),
    "gpt2": hugging_face("GPT2", n_positions=8),
    "llama": hugging_face("Llama"),
    "llama, grouped keys": hugging_face("Llama", num_key_value_heads=1),
    "gpt-oss, with sinks": hugging_face(
        "GptOss", num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
}


def gradients(model: nn.Module) -> list[Tensor]:
    given = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) if "ViT" in str(type(model)) else TOKENS
    out = model(given, output_attentions=True)
    for each in out.attentions:
        each.retain_grad()
    out[0].square().sum().backward()
    return [each.grad for each in out.attentions]


@pytest.mark.parametrize("family", MODELS)
def test_returned_maps_have_gradients(family: str) -> None:
    model = MODELS[family]()
    expected = gradients(model)
    swap_attention(model, "softmax")
    assert all(each.abs().sum() > 0 for each in expected)
    torch.testing.assert_close(gradients(model), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batched", [True, False])
def test_returned_maps_of_torch_have_gradients(batched: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    swap_attention(layer, "softmax")
    x = torch.randn(2, 5, 8) if batched else torch.randn(5, 8)
    out, shown = layer(x, x, x, average_attn_weights=False)
    shown.retain_grad()
    out.sum().backward()
    assert shown.shape == ((2, 2, 5, 5) if batched else (2, 5, 5))
    # Of the sum of the outputs, the gradient is the key's value times the summed output projection.
    value = nn.functional.linear(x, *(each.chunk(3)[2] for each in (layer.in_proj_weight, layer.in_proj_bias)))
    per_head = (value * layer.out_proj.weight.sum(0)).unflatten(-1, (2, 4)).sum(-1).movedim(-1, -2)
    torch.testing.assert_close(shown.grad, per_head.unsqueeze(-2).expand_as(shown), atol=1e-5, rtol=1e-4)


@pytest.mark.costly
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gpt2_returns_its_maps_compiled_too(whole: bool) -> None:
    """As a whole, or block by block, where compiled code cannot read what the model around collects."""
    model = MODELS["gpt2"]()
    expected = model(TOKENS, output_attentions=True).attentions
    swap_attention(model, "softmax")
    for block in () if whole else model.h:
        block.compile(backend="aot_eager")
    compiled = torch.compile(model, backend="aot_eager") if whole else model
    assert compiled(TOKENS).attentions is None
    torch.testing.assert_close(compiled(TOKENS, output_attentions=True).attentions, expected)
