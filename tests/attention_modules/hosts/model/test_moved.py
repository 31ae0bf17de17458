"""Blocks that move their tokens around a layer: values that layers share are then of other tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

import attnswap
from attention_modules.hosts.base import AttentionSwapError
from tests.attention_modules.hosts.sdpa.own import Joint, Outer, SequenceFirst


class Multihead(nn.Module):
    """nn.MultiheadAttention with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "own": Joint,
    "torch": Multihead,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    "timm": lambda: Attention(16, 4),
}


class Block(nn.Module):
    """A norm, tokens moved, attention, and tokens moved back."""

    def __init__(self, layer: nn.Module, moved: bool, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.attn, self.moved = norm(16), layer, moved

    def there(self, x: Tensor) -> Tensor:
        return x

    def back(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.there(self.norm(x)) if self.moved else self.norm(x)
        y = self.attn(y)
        return x + (self.back(y) if self.moved else y)


class Reversed(Block):
    def there(self, x: Tensor) -> Tensor:
        return x.flip(1)

    back = there


class Swapped(Block):
    """Of two tokens alone."""

    def there(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :3], x[:, 4:5], x[:, 3:4], x[:, 5:]], 1)

    back = there


class Windows(Block):
    """Swin's, of four tokens of a line."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).roll(-2, 1) if self.moved else self.norm(x)
        y = self.attn(y.reshape(-1, 4, 16)).reshape(x.shape)
        return x + (y.roll(2, 1) if self.moved else y)


class Lines(Block):
    """Rows or columns of an image."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).transpose(1, 2) if self.moved else self.norm(x)
        y = self.attn(y.flatten(0, 1)).reshape(y.shape)
        return x + (y.transpose(1, 2) if self.moved else y)


class Mixed(Block):
    """A convolution as positions, before the layer: what goes where cannot be told."""

    def there(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


BLOCKS = {"reversed": Reversed, "two tokens": Swapped, "windows": Windows, "lines": Lines}


def net(block: type[Block], layer: Callable[[], nn.Module], *moved: bool) -> nn.Module:
    return nn.Sequential(*(block(layer(), each) for each in moved))


def given(block: type[Block]) -> Tensor:
    return torch.randn(2, 4, 4, 16) if block is Lines else torch.randn(2, 16, 16)


@pytest.mark.parametrize("with_example", [False, True], ids=["alone", "example"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_values_are_not_shared_by_blocks_that_move_tokens_differently(
    block: str, layer: str, with_example: bool
) -> None:
    kind, make = BLOCKS[block], LAYERS[layer]
    example = given(kind) if with_example else None
    model = net(kind, make, False, True)
    before = model.state_dict()
    for mechanism in ("value_residual", "elliptical"):
        with pytest.raises(AttentionSwapError, match="'0' and '1' give them their tokens in other places"):
            attnswap.swap_attention(model, mechanism, example=example)
    assert model.state_dict().keys() == before.keys()
    for alike in (net(kind, make, False, False), net(kind, make, True, True)):
        assert len(attnswap.swap_attention(alike, "value_residual", example=example)) == 2
        alike(given(kind)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_and_an_order_of_axes_are_no_matter(dtype: torch.dtype) -> None:
    x = torch.randn(16, 2, 16, dtype=dtype)
    for moved in (False, True):
        model = nn.Sequential(*(Block(SequenceFirst(), False) for _ in range(2))).to(dtype)
        model[1].there = lambda x: x.flip(0)
        model[1].moved = moved
        if moved:
            with pytest.raises(AttentionSwapError, match="in other places"):
                attnswap.swap_attention(model, "value_residual", example=x)
        else:
            assert len(attnswap.swap_attention(model, "value_residual", example=x)) == 2


class ReversedOuter(Outer):
    """Around a module that is given queries, keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1)).flip(1)


def test_a_kernel_as_a_module_of_its_own_is_told_too() -> None:
    x = torch.randn(2, 12, 16)
    with pytest.raises(AttentionSwapError, match="'0' and '1' give them their tokens in other places"):
        attnswap.swap_attention(nn.Sequential(Outer(), ReversedOuter()), "value_residual", example=x)
    for kind in (Outer, ReversedOuter):
        assert len(attnswap.swap_attention(nn.Sequential(kind(), kind()), "value_residual", example=x)) == 2


def test_what_cannot_be_told_is_taken() -> None:
    assert len(attnswap.swap_attention(net(Mixed, Joint, False, True), "value_residual")) == 2


def test_it_is_told_without_values() -> None:
    with pytest.raises(AttentionSwapError, match="in other places"):
        attnswap.swap_attention(net(Reversed, Joint, False, True).to("meta"), "value_residual")
    assert len(attnswap.swap_attention(net(Reversed, Joint, True, True).to("meta"), "value_residual")) == 2


def test_the_model_and_random_numbers_are_as_before() -> None:
    model, x = net(Reversed, Joint, True, True), given(Reversed)
    calls: list[int] = []
    model[1].attn.register_forward_pre_hook(lambda *args: calls.append(1))
    state = torch.get_rng_state()
    attnswap.swap_attention(model, "neutreno", example=x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())
