"""Layers of one's own that may attend to a second sequence, and those whose names only sound so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnswap
from attention_modules import swap_attention
from lightning_tasks.callbacks import AttentionMonitor
from tests.attention_modules.hosts.sdpa.own import Joint


class Optional(nn.Module):
    """Attention to a context, where there is one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(32, 32), nn.Linear(width, 32), nn.Linear(width, 32)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention to itself, and to the context."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn1, self.attn2 = Optional(), Optional(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(x)
        return x + self.attn2(x, context=context)


class Net(nn.Module):
    """Two of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context)
        return x


@pytest.mark.parametrize("tokens", [7, 9])
@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("mechanism", ["linear", "twicing", "sinkhorn", "value_residual", "elliptical"])
def test_a_second_sequence_that_no_example_showed_is_refused(mechanism: str, width: int, tokens: int) -> None:
    """With an example the layers that attend to it are left out."""
    model, x, context = Net(width), torch.randn(2, 9, 32), torch.randn(2, tokens, width)
    with pytest.raises((NotImplementedError, ValueError), match=r"example=|cannot be told|cross-attention"):  # noqa: PT012
        swap_attention(model, mechanism)
        model(x, context)
    model = Net(width)
    assert [row.name for row in swap_attention(model, mechanism, example=(x, context))] == [
        "blocks.0.attn1",
        "blocks.1.attn1",
    ]
    model(x, context)


@pytest.mark.parametrize(("width", "watched"), [(32, False), (24, False), (32, True)])
def test_a_second_sequence_is_told_of_where_a_mechanism_takes_it(width: int, watched: bool) -> None:
    model, x, context = Net(width).train(), torch.randn(2, 9, 32), torch.randn(2, 7, width)
    told = pytest.warns(
        UserWarning, match=r"Optional 'blocks.0.attn2' was given a second sequence .*example_input_array"
    )
    if watched:
        with attnswap.watch(model, callbacks=[AttentionMonitor(1)], log=dict), told:
            model(x, context)
    else:
        swap_attention(model, "softmax")
        with told:
            model(x, context)


@pytest.mark.parametrize("part", ["cross_encoder", "crossmodal", "pool_encoder", "rerank"])
def test_the_name_of_a_part_around_makes_no_layer_cross_attention(part: str) -> None:
    model = nn.ModuleDict({part: nn.ModuleList(nn.ModuleDict({"attn": Joint()}) for _ in range(2))})
    assert [row.name for row in swap_attention(model, "sink")] == [f"{part}.{index}.attn" for index in range(2)]


class CrossAttention(Optional):
    """As latent diffusion calls both of its kinds."""


def test_a_call_of_the_model_tells_more_than_the_name_of_a_class() -> None:
    model = Net(24)
    for block in model.blocks:
        block.attn1, block.attn2 = CrossAttention(), CrossAttention(24)
    with pytest.raises(attnswap.AttentionSwapError, match="cross-attention only"):
        swap_attention(model, "sink")
    example = torch.randn(2, 9, 32), torch.randn(2, 7, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = swap_attention(model, "sink", example=example)
        model(*example)
    assert [row.name for row in rows] == ["blocks.0.attn1", "blocks.1.attn1"]
