"""Layers of one's own that may attend to a second sequence, and those whose names only sound so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnswap
from attention_modules import swap_attention
from attention_modules.hosts import attention_layers
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
        return x + self.attn2(x, context)


class Net(nn.Module):
    """Two of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context)
        return x


class Turning(Optional):
    """It does not run alone."""

    def forward(self, x: Tensor, context: Tensor | None = None, *, turned: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * float(turned), context)


SELF = ["blocks.0.attn1", "blocks.1.attn1"]


@pytest.mark.parametrize("mechanism", ["linear", "twicing", "sinkhorn", "value_residual", "neutreno", "elliptical"])
def test_a_second_sequence_that_no_example_showed_is_refused(mechanism: str) -> None:
    """With an example the layers that attend to it are left out."""
    model, x, context = Net(32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    swap_attention(model, mechanism)
    with pytest.raises(NotImplementedError, match=r"was given a second sequence .*pass example= with both"):
        model(x, context)
    model = Net(32)
    rows = swap_attention(model, mechanism, example=(x, context))
    assert [row.name for row in rows] == SELF
    model(x, context)


@pytest.mark.parametrize("mechanism", ["linear", "sinkhorn", "value_residual", "sink"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_layer_whose_keys_need_another_width_is_cross_attention_without_an_example(
    mechanism: str, declared: bool
) -> None:
    class Own(Optional):
        pass

    if declared:
        attnswap.declare_host(Own, q="to_q", k="to_k", v="to_v", heads=4)
    model = Net(24)
    for block in model.blocks:
        block.attn1, block.attn2 = Own(), Own(24)
    assert [row.name for row in swap_attention(model, mechanism)] == SELF
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 9, 32), torch.randn(2, 9, 24))


@pytest.mark.parametrize("tokens", [9, 7])
def test_a_mechanism_that_may_attend_to_it_acts_and_says_so(tokens: int) -> None:
    model = Net(32)
    swap_attention(model, "sink")
    with pytest.warns(UserWarning, match=r"Optional was given a second sequence, .* counts as self-attention"):
        model(torch.randn(2, 9, 32), torch.randn(2, tokens, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.blocks[0].attn2(x := torch.randn(2, 9, 32), x)
        torch.compile(model, backend="eager")(x, torch.randn(2, tokens, 32))


def test_of_a_layer_that_does_not_run_alone_sizes_say_what_may_be_a_second_sequence() -> None:
    swap_attention(model := nn.ModuleList([Turning(24)]), "linear")
    with pytest.raises(NotImplementedError, match="was given a second sequence"):
        model[0](torch.randn(2, 9, 32), torch.randn(2, 9, 24), turned=torch.ones(1))


class Turned(Optional):
    """What it is given beside its input is no keys: positions, a condition of one token, a bias."""

    def forward(self, x: Tensor, more: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = x if more is None else x + more.mean(-1, keepdim=True)
        q, k, v = (each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.to_q, self.to_k, self.to_v))
        bias = None if bias is None else bias.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mechanism", ["linear", "sinkhorn", "value_residual", "softmax"])
@pytest.mark.parametrize("shape", [(2, 1, 32), (2, 9, 8), (2, 1, 9), (2, 9, 32)])
def test_what_is_no_sequence_of_keys_is_taken(shape: tuple[int, ...], mechanism: str) -> None:
    model = Net(32)
    for block in model.blocks:
        block.attn1, block.attn2 = Turned(), Turned()
    swap_attention(model, mechanism)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 9, 32), torch.randn(shape))


class PerToken(Optional):
    """A condition of each token, of another width, by a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 32)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.more(more))


def test_a_condition_of_each_token_is_no_second_sequence() -> None:
    swap_attention(model := nn.ModuleList([PerToken()]), "linear")
    model[0](torch.randn(2, 9, 32), torch.randn(2, 9, 3))


@pytest.mark.parametrize("name", ["mix_attn", "flex_attn", "complex_attn.inner", "vertexattn"])
def test_names_that_only_end_so(name: str) -> None:
    model = nn.Module()
    outer, _, inner = name.partition(".")
    model.add_module(outer, nn.ModuleDict({inner: Optional()}) if inner else Optional())
    assert [row.name for row in swap_attention(model, "softmax")] == [name]


@pytest.mark.parametrize("name", ["cross.attn", "cross_block.attn", "attn_pool.attn", "cross_attn.0.fn", "xattn"])
def test_names_that_tell_of_cross_attention(name: str) -> None:
    model = nn.Module()
    *around, own = name.split(".")
    inner: nn.Module = model
    for part in around:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.add_module(own, Optional())
    model.other = Optional()
    assert [row.name for row in swap_attention(model, "softmax")] == ["other"]


@pytest.mark.parametrize("part", ["cross_encoder", "crossmodal", "pool_encoder"])
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
    assert [row.name for row in rows] == SELF
    assert [layer.name for layer in attention_layers(model)] == SELF  # nor does a name tell more afterwards
    assert [row.name for row in swap_attention(model, "linear")] == SELF


class Turns(Optional):
    """Positions turn queries and keys, of whatever sequence."""

    def forward(self, x: Tensor, context: Tensor, turns: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k = q * turns[:, : q.shape[1]], k * turns[:, : k.shape[1]]
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Halves(Optional):
    """Each half of the batch attends to the other."""

    def forward(self, x: Tensor, context: Tensor, turns: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x.roll(len(x) // 2, 0))


class Pair(Optional):
    """A decoder's self-attention: queries and keys with positions, values without."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.to_q(q), self.to_k(k), self.to_v(v)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Layers that all have "cross" in the name of their class."""

    def __init__(self, other: type[Optional]) -> None:
        super().__init__()
        kinds = (type(f"Cross{kind.__name__}", (kind,), {}) for kind in (Pair, other))
        self.own, self.other = (kind() for kind in kinds)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        turned = x + 0.1
        x = x + self.own(turned, turned, x)
        return x + self.other(x, context, torch.linspace(0.5, 1, 20 * 32).view(1, 20, 32))


@pytest.mark.parametrize(("other", "batch"), [(Turns, 1), (Turns, 2), (Halves, 2)])  # half of one sample is itself
@pytest.mark.parametrize("tokens", [9, 7])
def test_what_queries_and_keys_share_beside_their_sequences_makes_no_self_attention(
    other: type[Optional], batch: int, tokens: int
) -> None:
    """The second of two, whose queries depend on the context already."""
    model = nn.ModuleList(Decoder(other) for _ in range(2))
    model.forward = lambda x, context: model[1](model[0](x, context), context)  # type: ignore[method-assign]
    example = torch.randn(batch, 9, 32), torch.randn(batch, tokens, 32)
    rows = swap_attention(model, "softmax", example=example)
    assert [row.name for row in rows] == ["0.own", "1.own"]


class Twice(nn.Module):
    """One layer, which attends to itself first, then to the context."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.own = CrossAttention(), Optional()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.own(x)
        return x + self.both(x) + self.both(x, context)


def test_every_call_of_a_layer_counts() -> None:
    example = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    assert [row.name for row in swap_attention(Twice(), "softmax", example=example)] == ["own"]


class AttentionPool(nn.Module):
    """Learned queries ask the tokens."""

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.latents, self.kv = nn.Parameter(torch.randn(latents, 32)), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        q = self.latents.expand(len(x), -1, -1)
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (q, *self.kv(x).chunk(2, -1)))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("latents", [4, 9, 16])
def test_queries_of_its_own_make_a_layer_cross_attention_with_an_example_too(latents: int) -> None:
    model = nn.Sequential(AttentionPool(latents), Optional())
    assert [row.name for row in swap_attention(model, "softmax", example=torch.randn(2, 9, 32))] == ["1"]
