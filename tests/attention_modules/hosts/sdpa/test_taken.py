"""A mechanism in a layer takes the calls that PyTorch takes, and no others."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attention_modules import swap_attention
from attention_modules.analysis import attention_maps
from tests.attention_modules.hosts.cases import (
    DIM,
    HEADS,
    MECHANISMS as MECHANISMS_OF_ALL,
    TOKENS,
    WITHOUT_QUERY,
    features,
)

Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
NOT_CAUSAL = ("mom", "rkde", "sinkhorn")
MECHANISMS = ["softmax", "sink", "sigmoid", "entmax", "l2", "twicing", "linear"]


class Calls(nn.Module):
    """Four heads, and a call as it is asked for."""

    change: Change | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*(self.change or _as_it_is)(q, k, v), **given)


def _as_it_is(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def pair(mechanism: str, change: Change | None = None) -> tuple[Calls, Calls]:
    """A plain layer and its swapped copy."""
    torch.manual_seed(0)
    plain = Calls()
    swapped = copy.deepcopy(plain)
    swap_attention(swapped, mechanism, example=features())
    plain.change = swapped.change = change
    return plain, swapped


class Free(nn.Module):
    """Attention over the last dimensions, whatever is before them."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("name", [each for each in MECHANISMS_OF_ALL if each not in WITHOUT_QUERY])
def test_one_sample_without_a_batch_is_as_a_batch_of_one(name: str, with_example: bool) -> None:
    """Its heads stand where a batch would."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(Free(name not in NOT_CAUSAL) for _ in range(2))).double().eval(),
        torch.randn(TOKENS, DIM, dtype=torch.float64),
    )
    mechanism, options = MECHANISMS_OF_ALL[name]
    swap_attention(model, mechanism, example=x if with_example else None, **options)
    for each in (each for key, each in model.named_parameters() if "mechanism" in key):
        nn.init.normal_(each, std=0.5)
    torch.testing.assert_close(model(x), model(x[None])[0], atol=1e-12, rtol=1e-12)


def raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as error:  # noqa: PT011  # that of PyTorch is the witness
        call()
    return error.type, str(error.value)


REFUSED: dict[str, tuple[Change | None, dict[str, Any]]] = {
    "grouped": (lambda q, k, v: (q, k[:, :2], v[:, :2]), {}),
    "heads that do not divide": (lambda q, k, v: (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
    "mask and causal": (None, {"attn_mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True}),
    "bias and causal": (None, {"attn_mask": causal_upper_left(6, 6), "is_causal": True}),
    "narrow": (lambda q, k, v: (q[..., :3], k, v), {}),
    "dtypes": (lambda q, k, v: (q, k, v.double()), {}),
    "integers": (lambda q, k, v: (q.int(), k.int(), v.int()), {}),
    "samples": (lambda q, k, v: (q, k.repeat(2, 1, 1, 1), v), {}),
    "no rows": (lambda q, k, v: (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), {}),
    "mask of float64": (None, {"attn_mask": torch.zeros(6, 6, dtype=torch.float64)}),
    "mask of integers": (None, {"attn_mask": torch.ones(6, 6, dtype=torch.long)}),
    "mask of other keys": (None, {"attn_mask": torch.ones(6, 5, dtype=torch.bool)}),
    "mask of more dimensions": (None, {"attn_mask": torch.ones(1, 1, 1, 6, 6, dtype=torch.bool)}),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_pytorch_refuses_is_the_same_error(case: str, mechanism: str) -> None:
    change, given = REFUSED[case]
    plain, swapped = pair(mechanism, change)
    assert raised(lambda: swapped(features(), **given)) == raised(lambda: plain(features(), **given))


@pytest.mark.parametrize("case", ["grouped", "mask and causal"])
def test_so_it_is_compiled(case: str) -> None:
    change, given = REFUSED[case]
    errors = []
    for layer in pair("sink", change):
        torch._dynamo.reset()
        kind, text = raised(lambda layer=layer: torch.compile(layer, backend="aot_eager")(features(), **given))
        errors.append((kind, re.findall(r"got \w+Error\(.*\)", text)))
    assert errors[0] == errors[1]
    assert errors[0][1]


def test_under_autocast_dtypes_may_differ() -> None:
    plain, swapped = pair("softmax", lambda q, k, v: (q.float(), k, v.half()))
    with torch.autocast("cpu", torch.bfloat16):
        given = {"attn_mask": torch.zeros(6, 6, dtype=torch.float16)}
        assert torch.equal(swapped(features(), **given), plain(features(), **given))
        swapped.change = plain.change = REFUSED["dtypes"][0]
        assert raised(lambda: swapped(features())) == raised(lambda: plain(features()))


SPREAD: dict[str, tuple[Change, dict[str, Any]]] = {
    "one sample of queries": (lambda q, k, v: (q[:1, :, :3], k, v), {}),
    "one sample of keys": (lambda q, k, v: (q, k[:1], v[:1]), {}),
    "one sample, masks of each": (
        lambda q, k, v: (q[:1], k, v),
        {"attn_mask": torch.arange(6) < torch.tensor([2, 6]).view(2, 1, 1, 1)},
    ),
    "one head of queries": (lambda q, k, v: (q[:, :1], k, v), {}),
    "one head of keys": (lambda q, k, v: (q, k[:, :1], v[:, :1]), {}),
    "queries without samples": (lambda q, k, v: (q[0], k, v), {}),
    "keys without samples": (lambda q, k, v: (q, k[0], v[0]), {}),
    "as many samples as heads": (lambda q, k, v: (q.repeat(2, 1, 1, 1), k[0], v[0]), {}),
    "queries alone": (lambda q, k, v: (q[0, 0], k, v), {}),
    "grouped": (lambda q, k, v: (q, k[:, :2], v[:, :1]), {"enable_gqa": True}),
    "grouped, one sample": (lambda q, k, v: (q[:1], k[:, :2], v[:, :2]), {"enable_gqa": True}),
    "causal bias": (lambda q, k, v: (q[:1, :, :3], k, v), {"attn_mask": causal_lower_right(3, 6)}),
}


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "sigmoid"])
@pytest.mark.parametrize("case", SPREAD)
def test_sizes_broadcast_as_in_pytorch(case: str, mechanism: str) -> None:
    change, given = SPREAD[case]
    plain, swapped = pair(mechanism, change)
    expected, out = plain(features(), **given), swapped(features(), **given)
    assert out.shape == expected.shape
    if mechanism == "softmax":
        torch.testing.assert_close(out, expected)

    def expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = change(q, k, v)
        groups = [4 // each.shape[-3] if "enable_gqa" in given else 1 for each in made]
        made = [each.repeat_interleave(by, -3) if by > 1 else each for each, by in zip(made, groups, strict=True)]
        return tuple(each.expand(*out.shape[:2], *each.shape[-2:]).clone() for each in made)

    swapped.change = expanded
    torch.testing.assert_close(out, swapped(features(), **{k: v for k, v in given.items() if k != "enable_gqa"}))


class Resampler(nn.Module):
    """Latents that ask, one sample of them, and not expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.kv, self.out = nn.Parameter(torch.randn(1, 3, 16)), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in (self.latents, *self.kv(x).chunk(2, -1)))
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("example", [None, features()], ids=["code", "example"])
def test_latents_that_are_not_expanded(example: Tensor | None) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(Resampler()), features()
    model = copy.deepcopy(plain)
    swap_attention(model, "softmax", where="0", example=example)
    torch.testing.assert_close(model(x), plain(x))
    layer = plain[0]
    q, k = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in (layer.latents, layer.kv(x)[..., :16]))
    expected = (q @ k.mT / 2).softmax(-1)
    torch.testing.assert_close(attention_maps(plain, x, layers="0")["0"], expected)
    swap_attention(model, "sigmoid", where="0", example=example)
    assert attention_maps(model, x, layers="0")["0"].shape == expected.shape
    if torch.__version__ >= (2, 14):  # type: ignore[operator]  # that of 2.9 cannot look into Tensor.unflatten here
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        for batch in (x, x.repeat(3, 2, 1)):
            torch.testing.assert_close(compiled(batch), model(batch))
