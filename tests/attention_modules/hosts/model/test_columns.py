"""What learns by column is given columns that are positions, by whatever layer it acts in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from attention_modules import SelfAttention, swap_attention
from tests.attention_modules.hosts.sdpa.own import Joint

N = 6
PAST = torch.ones(N, N, dtype=torch.bool).tril()
DISTANCE = torch.arange(N)[:, None] - torch.arange(N)


def hidden(*columns: int) -> Tensor:
    return torch.tensor([each not in columns for each in range(N)]).expand(N, N)


SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1])
SAME = SEQUENCE[:, None] == SEQUENCE
TREE = PAST.clone()
TREE[4:, 3] = False  # a branch that others see
REFUSED = {
    "padding before": hidden(0, 1),
    "padding before, causal": hidden(0) & PAST | torch.eye(N, dtype=torch.bool),
    "packed": SAME,
    "packed, causal": SAME & PAST,
    "a tree": TREE,
}
TAKEN = {
    "causal": PAST,
    "padding behind": hidden(4, 5),
    "padding behind, causal": hidden(4, 5) & PAST,
    "hidden from all": hidden(2) & PAST,
    "nothing": hidden(*range(N)),
    "a window": (DISTANCE.abs() <= 1),
    "a window, causal, padding behind": PAST & (DISTANCE <= 2) & hidden(5),
    "a prefix": PAST | hidden(3, 4, 5),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    "own": lambda: Joint(16, 4),
    "timm": lambda: Attention(16, 4),
    "attnswap": lambda: SelfAttention(16, 4),
}
MECHANISMS = {"position_bias": {"num_tokens": N}, "scaled": {"num_tokens": N}}


def run(kind: str, layer: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    if kind == "torch":
        return layer(x, x, x, attn_mask=~seen, need_weights=False)[0]
    return layer(x, attn_mask=seen)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_columns_that_are_no_positions_are_refused(kind: str, mechanism: str) -> None:
    layer = LAYERS[kind]()
    swap_attention(layer, mechanism, **MECHANISMS[mechanism])
    x = torch.randn(2, N, 16)
    for seen in REFUSED.values():
        with pytest.raises(ValueError, match="counts columns"):
            run(kind, layer, x, seen)
    for seen in TAKEN.values():
        assert run(kind, layer, x, seen).shape == x.shape


def test_masks_of_padding_by_sample() -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, N, 16)
    swap_attention(layer, "position_bias", num_tokens=N)
    behind, before = (torch.stack([hidden()[0], hidden(*columns)[0]]) for columns in ((4, 5), (0, 1)))
    layer(x, x, x, key_padding_mask=~behind)
    with pytest.raises(ValueError, match="counts columns"):
        layer(x, x, x, key_padding_mask=~before)


def test_transforms_of_torch_func_are_told_too() -> None:
    layer, x = Joint(16, 4), torch.randn(2, N, 16)
    swap_attention(layer, "position_bias", num_tokens=N)

    def total(x: Tensor, seen: Tensor) -> Tensor:
        return layer(x[None], attn_mask=seen).sum()

    calls: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, seen: torch.func.grad(total)(x[0], seen),
        lambda x, seen: torch.func.jvp(lambda x: total(x, seen), (x[0],), (x[0],))[1],
        lambda x, seen: torch.vmap(total, (0, None))(x, seen),
        lambda x, seen: torch.vmap(total)(x, torch.stack([PAST, seen])),
        lambda x, seen: torch.vmap(torch.func.grad(total))(x, torch.stack([seen, PAST])),
    ]
    for call in calls:
        call(x, PAST)
        with pytest.raises(ValueError, match="counts columns"):
            call(x, SAME)


def test_no_token_is_no_error() -> None:
    layer, x = Joint(16, 4), torch.randn(2, 0, 16)
    swap_attention(layer, "position_bias", num_tokens=N)
    assert layer(x, attn_mask=torch.ones(0, 0, dtype=torch.bool)).shape == x.shape


def test_it_is_checked_in_compiled_and_exported_layers() -> None:
    layer, x = Joint(16, 4).eval(), torch.randn(2, N, 16)
    swap_attention(layer, "position_bias", num_tokens=N)
    for program in (torch.compile(layer, backend="aot_eager"), torch.export.export(layer, (x, PAST)).module()):
        assert torch.allclose(program(x, PAST), layer(x, PAST), atol=1e-6)
        with pytest.raises(RuntimeError, match="counts columns"):
            program(x, SAME)
