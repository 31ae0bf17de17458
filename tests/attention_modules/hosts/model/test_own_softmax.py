"""A layer that returns a softmax of its own beside what the mechanism gives is told of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules import swap_attention
from attention_modules.analysis import attention_maps
from tests.attention_modules.hosts.cases import features
from tests.attention_modules.hosts.sdpa.own import Joint, NanoAttention


class Returns(nn.Module):
    """It gives a map on request."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, with_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (out, (q @ k.mT / 2).softmax(-1)) if with_map else out


class ReturnsInABranch(Returns):
    """It gives a map on request, behind the call."""

    def forward(self, x: Tensor, with_map: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if with_map:
            return out, (q @ k.mT / 2).softmax(-1)
        return out


class Either(Joint):
    """It computes one or the other."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        if attn_mask is not None:
            logits = q @ k.mT / 2 + attn_mask
            y = logits.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Falls(Joint):
    """It calls what falls back to a softmax where PyTorch is old."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        return self.c_proj(_attend(q, k, v).transpose(1, 2).flatten(2))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not hasattr(F, "scaled_dot_product_attention"):
        return (q @ k.mT / 2).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", [Returns, ReturnsInABranch])
def test_a_softmax_beside_the_call_is_told_of_once(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(), kind())
    for mechanism in ("uniform", "sigmoid"):  # of plain layers, and of swapped ones
        with pytest.warns(
            UserWarning, match=rf"^{kind.__name__} also computes a softmax .*take attention_maps"
        ) as told:
            swap_attention(model, mechanism)
        assert len(told) == 1
        assert told[0].filename == __file__
    own = model[0](features(), with_map=True)[1]
    assert not torch.allclose(own, attention_maps(model, features())["0"])


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [(Returns, "softmax"), *((kind, "sigmoid") for kind in (Joint, NanoAttention, Either, Falls))],
)
def test_nothing_is_said_of_others(kind: type[nn.Module], mechanism: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(nn.Sequential(kind()), mechanism)
        attention_maps(nn.Sequential(kind()), features())
