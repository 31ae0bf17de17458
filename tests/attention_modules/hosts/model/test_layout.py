"""Softmax put in for softmax: the same memory layouts and dropout draws, so that training stays bitwise identical."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts import attention_layers
from attention_modules.swap import swap_attention
from tests.attention_modules.hosts.cases import HOSTS, built, padding_mask
from tests.attention_modules.hosts.timm import cases as timm_cases

# Layers that write softmax(q kᵀ) v out instead of calling scaled_dot_product_attention, or call it on axes of their
# own: the same draws and layouts, and the same numbers but for rounding.
ROUNDED_HOSTS = ("mmseg-vit", "mmseg-segformer", "mmseg-segformer-reduced")
ROUNDED_LAYERS = (
    "sam",
    "levit",
    "levit-conv",
    "efficientformer",
    "swin",
    "swin-v2",
    "swin-v2-separate-bias",
    "swin-v2-cr",
    "gcvit",
    "convit",
    "tnt",
    "nest",
    "hiera-units",
    "visformer",
    "botnet",
    "botnet-pooled",
    "lowformer",
    "cpubone",
)
# TNT's dropout of weights works in place, so that its own backward fails; NesT draws it head by head of five axes.
NO_WEIGHT_DROPOUT = ("tnt", "nest")


def with_dropout(model: nn.Module, weights: bool = True, p: float = 0.3) -> nn.Module:
    """The model in training, with dropout wherever it has some."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in ("dropout", "attention_dropout", "dropout_prob") and isinstance(value, float):
                setattr(module, name, p)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = p if weights or not name.endswith("attn_drop") else 0.0
    model.train()  # which returns None in LeViT and its kin
    return model


def trained(model: nn.Module, run: Callable[[nn.Module], Any], steps: int = 2) -> tuple[list[Any], list[Tensor]]:
    """Layouts of all the layers' outputs, and the losses, gradients, weights and random state of a few steps."""
    layouts: list[Any] = []

    def record(_: nn.Module, args: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        layouts.append((tuple(out.shape), out.stride()))

    handles = [layer.module.register_forward_hook(record) for layer in attention_layers(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    numbers = []
    for _ in range(steps):
        out = run(model)
        loss = torch.nan_to_num(out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        numbers.append(loss.detach())
        numbers += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return layouts, [*numbers, *(parameter.detach() for parameter in model.parameters()), torch.get_rng_state()]


def check(model: nn.Module, run: Callable[[nn.Module], Any], rounded: bool) -> None:
    twin = copy.deepcopy(model)
    swap_attention(twin, "softmax")
    (layouts, expected), (got_layouts, got) = trained(model, run), trained(twin, run)
    assert got_layouts == layouts
    assert len(got) == len(expected)
    assert torch.equal(got[-1], expected[-1])
    for mine, plain in zip(got, expected, strict=True):
        if rounded:
            torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
        else:
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("host", HOSTS)
def test_training_is_the_same(host: str) -> None:
    case = HOSTS[host]
    padding = padding_mask() if case.padding else None
    check(with_dropout(built(host)), lambda model: case.run(model, padding), host in ROUNDED_HOSTS)


@pytest.mark.parametrize("name", timm_cases.LAYERS)
def test_training_of_a_layer_of_timms_is_the_same(name: str) -> None:
    inputs = timm_cases.LAYERS[name].inputs()
    model = with_dropout(timm_cases.layer(name), weights=name not in NO_WEIGHT_DROPOUT)
    check(model, lambda model: model(*inputs), name in ROUNDED_LAYERS)


@pytest.mark.parametrize("asked", [True, False], ids=["weights", "no-weights"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "sequence-first"])
@pytest.mark.parametrize("inputs", ["self", "keys", "all-differ", "unbatched"])
def test_every_way_to_call_multihead_attention(inputs: str, batch_first: bool, asked: bool) -> None:
    x, y, z = torch.randn(3, 4, 6, 16).unbind()
    given = {"self": (x, x, x), "keys": (x, y, y), "all-differ": (x, y, z), "unbatched": (x[0], y[0], y[0])}[inputs]
    model = with_dropout(nn.MultiheadAttention(16, 4, batch_first=batch_first))
    check(model, lambda model: model(*given, need_weights=asked), rounded=False)
