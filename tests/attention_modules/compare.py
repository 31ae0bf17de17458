"""Outputs and gradients of two functions, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_modules import AttentionMechanism


def largest_saved(function: Callable[[], Tensor]) -> int:
    """The most elements of a tensor that is kept for the backward pass of what the function gives, which is run."""
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function().backward()
    return largest


def random_heads(names: str = "qkv", shape=(2, 3, 9, 8), seed: int = 0, dtype=torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}


def as_it_must(mechanism: AttentionMechanism | type[AttentionMechanism]) -> dict[str, bool]:
    """The arguments of a call that says no more than it must: nothing, or that the future is hidden."""
    return {"is_causal": True} if mechanism.causality == "always" else {}


def values_and_gradients(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradient of a weighted sum of it for every input."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(**leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), list(leaves.values()), materialize_grads=True)
    return {"output": out.detach(), **{f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within ``tolerance`` of the largest entry of what is expected."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        error = (actual[name] - reference).abs().max().item()
        assert error <= tolerance * (1 + reference.abs().max().item()), f"{name}: {error:.3g}"


def masks(tokens: int = 9) -> dict[str, dict[str, object]]:
    """Arguments that hide something, for samples of two and three heads."""
    generator = torch.Generator().manual_seed(5)
    random = torch.rand(2, 3, tokens, tokens, generator=generator) > 0.4
    random |= torch.eye(tokens, dtype=torch.bool)
    padding = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 4]]))[:, None, None]  # [2, 1, 1, N]
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return {
        "nothing": {},
        "causal": {"is_causal": True},
        "causal mask": {"attn_mask": past},
        "padding": {"attn_mask": padding},
        "padding and causal": {"attn_mask": padding, "is_causal": True},
        "a head": {"attn_mask": random[0]},
        "a sample": {"attn_mask": random[:, :1]},
        "all": {"attn_mask": random},
        "additive": {"attn_mask": torch.zeros(random.shape, dtype=torch.float64).masked_fill(~random, -torch.inf)},
        "bias": {"attn_mask": torch.randn(1, 3, tokens, tokens, generator=generator, dtype=torch.float64)},
    }
