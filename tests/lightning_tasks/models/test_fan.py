"""FAN-tiny: its published sizes, its channel attention written out, and attention swapped in it."""

import pytest
import timm
import torch
from torch import nn

from attention_modules.hosts import attention_layers
from lightning_tasks import ImageClassificationTask
from lightning_tasks.models.fan import ChannelProcessing, ClassBlock

SMALL = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}


def task(**chosen):
    built = ImageClassificationTask("fan_tiny_12_p16_224", **{"num_classes": 1000, **chosen})
    built.configure_model()
    return built


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ({}, 7_319_920),
        ({"mechanism": "symmetric", "model_options": {"class_query": False}}, 6_801_136),
        (
            {
                "mechanism": "rpc",
                "options": {"iterations": 4, "lam": 4.0},
                "layers": [0],
                "other_attention": "symmetric",
                "model_options": {"class_query": False},
            },
            6_801_136,
        ),
    ],
    ids=["softmax", "symmetric", "rpc"],
)
def test_has_as_many_parameters_as_published(chosen, count):
    assert sum(parameter.numel() for parameter in task(**chosen).model.parameters()) == count


@pytest.mark.parametrize("class_query", [True, False])
def test_every_parameter_trains_at_any_size(class_query):
    model = timm.create_model("fan_tiny_12_p16_224", num_classes=5, class_query=class_query, **SMALL)
    for side in (32, 48):
        model.zero_grad()
        out = model(torch.randn(2, 3, side, side))
        assert out.shape == (2, 5)
        out.square().sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert model.forward_features(torch.randn(1, 3, 32, 32)).shape == (1, 1 + 4, 16)
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)


def test_channel_attention_is_its_formula():
    torch.manual_seed(0)
    layer = ChannelProcessing(dim=8, num_heads=2, hidden=16).eval()
    nn.init.normal_(layer.temperature)
    x = torch.randn(1, 6, 8)
    values = layer.norm(layer.mlp(x, (2, 3)))
    expected = torch.empty_like(values)
    for head in range(2):
        columns = slice(4 * head, 4 * head + 4)
        q, k = (part[0, :, columns].softmax(0) for part in (layer.q(x), x))
        weights = torch.sigmoid(q.T @ k.mean(1)) * layer.temperature[head, 0, 0]
        expected[0, :, columns] = values[0, :, columns] * weights
    torch.testing.assert_close(layer(x, (2, 3)), expected)


def test_only_the_class_token_is_changed_by_the_mlp_of_its_blocks():
    block = ClassBlock(8, 2, 2.0, uses_query=False).eval()
    x = torch.randn(1, 5, 8)
    normed = block.norm1(x)
    expected = 2 * block.norm2(x[:, 1:] + normed[:, 1:])
    torch.testing.assert_close(block(x)[:, 1:], expected)


def test_mechanisms_go_into_the_token_mixers():
    built = task(num_classes=5, mechanism="neutreno", model_options=SMALL)
    assert [layer.name for layer in attention_layers(built.model)] == ["blocks.0.attn", "blocks.1.attn"]
    assert built(torch.randn(2, 3, 32, 32)).isfinite().all()
