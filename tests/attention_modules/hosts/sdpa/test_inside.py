"""Modules that call the function themselves and have attention layers inside: which of them are layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from attention_modules import restore_attention, swap_attention
from attention_modules.hosts.base import Swapped
from tests.attention_modules.hosts.cases import features
from tests.attention_modules.hosts.sdpa.own import Joint


class Around(Joint):
    """It calls the function beside a part that does so too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Joint()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


@pytest.mark.parametrize("example", [None, features()])
def test_a_layer_in_a_layer(example: Tensor | None) -> None:
    model = nn.Sequential(Around())
    report = swap_attention(model, "uniform", example=example)
    assert [row.name for row in report] == ["0.inner"]
    assert [row.name for row in report.skipped] == ["0"]
    alone = Joint()
    alone.load_state_dict(model[0].inner.state_dict())
    swap_attention(alone, "uniform")
    torch.testing.assert_close(model(features()), Joint.forward(model[0], alone(features())))


class Pools(nn.Module):
    """It asks the tokens of an encoder itself."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.query = encoder, nn.Parameter(torch.randn(1, 1, 192))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.encoder(x)
        return nn.functional.scaled_dot_product_attention(self.query.expand(len(x), -1, -1), tokens, tokens)


@pytest.mark.parametrize("mechanism", ["sigmoid", "entmax", "retention", "symmetric"])
def test_a_model_that_calls_the_function_hides_no_layers_inside(mechanism: str) -> None:
    layer = nn.TransformerEncoderLayer(192, 3, 192, batch_first=True)
    vit = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    vit.forward = vit.forward_features
    for encoder in (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), vit):
        model, inside = Pools(encoder), [row.name for row in swap_attention(copy.deepcopy(encoder), mechanism)]
        names = [f"encoder.{name}" for name in inside]
        for name in (mechanism, "softmax"):  # the second of a swapped model
            report = swap_attention(model, name)
            assert [row.name for row in report] == names
            assert [(row.name, "stands for one call" in row.reason) for row in report.skipped] == [("", True)]
        restore_attention(model)
        assert not [each for each in model.modules() if isinstance(each, Swapped)]


class Holds(nn.Module):
    """It computes with the projections of a layer inside, and calls the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias)
        heads = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in made.chunk(3, 2))
        return self.inner.out_proj(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def test_a_module_that_computes_with_the_projections_of_a_part_is_the_layer() -> None:
    model = nn.Sequential(Holds())
    plain = model(features())
    assert [row.name for row in swap_attention(model, "uniform")] == ["0"]
    assert not torch.allclose(model(features()), plain)
