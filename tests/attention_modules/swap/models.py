"""Small models with attention layers, and mechanisms with parameters of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_modules.mechanism import AttentionSpec
from attention_modules.mechanisms.softmax import SoftmaxAttention
from attention_modules.swap import (
    SwapReport,
)

DIM, HEADS = 8, 2


class Noisy(SoftmaxAttention):
    """Plain attention with a random Parameter, a buffer and dropout of its own."""

    def __init__(self, spec: AttentionSpec, fail_at: int = -1) -> None:
        super().__init__(spec)
        if spec.layer_index == fail_at:
            raise ValueError(f"layer {fail_at} refuses")
        self.noise = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(1))


class NoisyWithoutQuery(Noisy):
    """The same, of keys alone."""

    uses_query = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        return super().forward(k, k, v, *args, **kwargs)


def mha() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True)


class Block(nn.Module):
    """An attention layer and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = mha(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x, x, x, need_weights=False)[0])


class Pyramid(nn.Module):
    """Three blocks, and modules that look like attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = AttentionPool()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class AttentionPool(nn.Module):
    """Attention-like, by name alone."""


class WindowAttention(nn.Module):
    """Another library's layer."""


class OwnForward(nn.MultiheadAttention):
    """A host's class with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


class SameForward(nn.MultiheadAttention):
    """A host's class by another name."""


def state_of(model: nn.Module) -> list[tuple[str, type, list[int], list[str]]]:
    """All that a swap could change: classes, Parameters, children."""
    return [
        (
            name,
            type(module),
            [id(p) for p in module._parameters.values()],
            list(module._modules) + list(module._buffers),
        )
        for name, module in model.named_modules()
    ]


def names(report: SwapReport) -> list[str]:
    return [row.name for row in report]


ALL = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
