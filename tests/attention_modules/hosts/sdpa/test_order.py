"""A layer that moves its tokens inside: what reads its input, or other layers' values, would take one for another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnswap
from attention_modules.hosts.base import AttentionSwapError
from tests.attention_modules.hosts.sdpa.own import Joint

INPUT = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda x: x.flip(1),
    "rolled": lambda x: x.roll(2, 1),
    "sorted": lambda x: x.gather(1, x[..., :1].argsort(1).expand_as(x)),
    "by column": lambda x: x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2),
    "features first": lambda x: x.transpose(1, 2),
    "mixed": lambda x: x + x.roll(1, 1),
}
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "as given": lambda x: x,
    "normed": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sequence first": lambda x: x.transpose(0, 1),
}


class Moving(Joint):
    """Joint, with tokens in another order."""

    def __init__(self, move: Callable[[Tensor], Tensor], after: bool = False) -> None:
        super().__init__()
        self.move, self.after = move, after

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.c_attn(x if self.after else self.move(x))
        heads = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in (self.move(x) if self.after else x).chunk(3, 2))
        return F.scaled_dot_product_attention(*heads, attn_mask).transpose(1, 2).flatten(2)


class Axial(Joint):
    """``[B, R, C, width]``, along rows or columns."""

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along = along

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        lines = x if self.along else x.transpose(1, 2)
        heads = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.c_attn(lines.flatten(0, 1)).chunk(3, 2))
        out = F.scaled_dot_product_attention(*heads, attn_mask).transpose(1, 2).flatten(2).view(lines.shape)
        return x + (out if self.along else out.transpose(1, 2))


@pytest.mark.parametrize("example", [None, INPUT], ids=["alone", "example"])
@pytest.mark.parametrize("name", MOVED)
def test_what_is_read_of_a_token_is_not_of_another(name: str, example: Tensor | None) -> None:
    moved = Moving(MOVED[name])
    example = INPUT if name == "features first" else example  # which runs on a square alone
    with pytest.raises(AttentionSwapError, match="not of the tokens in their places"):
        attnswap.swap_attention(moved, "forgetting", example=example)
    for layers in ([Moving(KEPT["as given"]), moved], [moved, Moving(KEPT["as given"])]):
        with pytest.raises(AttentionSwapError, match=r"reads the values of '0': (there )?it moves its tokens"):
            attnswap.swap_attention(nn.Sequential(*layers), "value_residual", example=example)


def test_it_is_told_without_values() -> None:
    with torch.device("meta"):
        moved, kept = Moving(MOVED["reversed"]), Moving(KEPT["normed"])
    with pytest.raises(AttentionSwapError, match="not of the tokens in their places"):
        attnswap.swap_attention(moved, "forgetting")
    assert len(attnswap.swap_attention(kept, "forgetting")) == 1


def test_tokens_that_move_after_the_projection_are_told() -> None:
    with pytest.raises(AttentionSwapError, match="not of the tokens in their places"):
        attnswap.swap_attention(Moving(MOVED["reversed"], after=True), "gated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KEPT)
def test_tokens_that_keep_their_places_are_no_matter(name: str, dtype: torch.dtype) -> None:
    layers = nn.Sequential(Moving(KEPT[name]), Moving(KEPT[name])).to(dtype)
    attnswap.swap_attention(layers, "value_residual", example=INPUT[:, :12].to(dtype))
    attnswap.swap_attention(layers, "gated")


def test_rows_and_columns_in_turn_share_no_values() -> None:
    image = INPUT.view(2, 4, 4, 16)
    with pytest.raises(AttentionSwapError, match="it moves its tokens"):
        attnswap.swap_attention(nn.Sequential(Axial(1), Axial(0)), "value_residual", example=image)
    assert len(attnswap.swap_attention(nn.Sequential(Axial(1), Axial(1)), "value_residual", example=image)) == 2


class Apart(Joint):
    """Joint, whose queries, keys and values are each made by a function of its own."""

    def __init__(self, *made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        parts = (
            make(t.unflatten(2, (4, -1)).transpose(1, 2))
            for make, t in zip(self.made, self.c_attn(x).chunk(3, 2), strict=True)
        )
        return F.scaled_dot_product_attention(*parts, attn_mask).transpose(1, 2).flatten(2)


def kept(x: Tensor) -> Tensor:
    return x


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, 2)


def flipped_but_for_the_first(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :1] * 1000, x[:, :, 1:].flip(2)], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made", [normed, lambda x: x.softmax(-1), lambda x: F.normalize(x, dim=-1)])
def test_features_whose_sum_is_the_same_for_each_token_are_told(made: Callable, dtype: torch.dtype) -> None:
    layers = nn.Sequential(Apart(made, made, made), Apart(made, made, made)).to(dtype)
    attnswap.swap_attention(layers, "value_residual")
    attnswap.swap_attention(layers, "forgetting")
    moved = Apart(lambda x: made(rolled(x)), made, made).to(dtype)
    with pytest.raises(AttentionSwapError, match="its queries are not of the tokens in their places"):
        attnswap.swap_attention(moved, "gated")


@pytest.mark.parametrize("made", [(kept, rolled, rolled), (kept, rolled, kept)])
def test_keys_that_move_are_refused_where_each_key_has_a_gate_of_its_token(made: tuple) -> None:
    with pytest.raises(AttentionSwapError, match="its keys are not of the tokens in their places"):
        attnswap.swap_attention(Apart(*made), "forgetting")
    assert len(attnswap.swap_attention(Apart(*made), "gated")) == 1  # a gate of each query


def test_a_large_token_hides_no_move_of_others() -> None:
    with pytest.raises(AttentionSwapError, match="its queries are not of the tokens in their places"):
        attnswap.swap_attention(Apart(*[flipped_but_for_the_first] * 3), "gated")


class Positions(Joint):
    """Positions are added to queries and keys, as in DETR."""

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, _ = self.c_attn(x + positions).chunk(3, 2)
        heads = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in (q, k, self.c_attn(x).chunk(3, 2)[2]))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def test_the_input_of_queries_with_positions_is_that_of_values() -> None:
    layer, positions, x = Positions(), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    attnswap.swap_attention(layer, "gated", example=(positions, x))
    given: list[Tensor] = []
    layer.mechanism.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs["x"]), with_kwargs=True)
    layer(positions, x)
    assert given[0] is x


@pytest.mark.parametrize("example", [None, INPUT], ids=["alone", "example"])
def test_projections_of_zeros_hide_no_move(example: Tensor | None) -> None:
    moved, still = Moving(MOVED["reversed"]), Moving(KEPT["as given"])
    for layer in (moved, still):
        nn.init.zeros_(layer.c_attn.weight)
    with pytest.raises(AttentionSwapError, match="not of the tokens in their places"):
        attnswap.swap_attention(moved, "gated", example=example)
    attnswap.swap_attention(still, "gated", example=example)
    assert not still.c_attn.weight.any()
