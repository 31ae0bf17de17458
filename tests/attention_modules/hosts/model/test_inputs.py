"""Copies of arguments leave the user's as they are, and a full cache is told from an empty one."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from attention_modules.hosts.model.inputs import continues, copied_arguments
from tests.rows import each_row


class OwnCache:
    def __init__(self):
        self.keys = [torch.zeros(1, 2)]


def test_copies_hold_the_same_values_apart_and_what_is_one_is_one():
    x = torch.ones(2, 3, requires_grad=True) * 2  # which copy.deepcopy refuses
    given = {"x": x, "again": (x, x.view(2, 3)), "cache": OwnCache(), "sparse": torch.eye(2).to_sparse(), "n": 3}
    found = copied_arguments(given)
    assert torch.equal(found["x"], x)
    assert found["x"] is found["again"][0] is found["again"][1] is not x
    assert found["n"] == 3
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))
    found["cache"].keys[0] += 1
    found["cache"].keys.append(x)
    assert len(given["cache"].keys) == 1
    assert (given["cache"].keys[0] == 0).all()


def test_modules_sentinels_and_what_stands_on_a_plain_tensor_are_not_copied():
    layer, nothing, mask = nn.Linear(2, 2), object(), torch.ones(2)
    mask.read = "before"
    found = copied_arguments(((layer, nothing), {"mask": mask}))
    assert found[0] == (layer, nothing)
    assert not vars(found[1]["mask"])


def test_a_causal_bias_stays_one():
    bias, x = causal_lower_right(2, 3), torch.randn(1, 1, 3, 4)
    found = scaled_dot_product_attention(x[..., 1:, :], x, x, attn_mask=copied_arguments({"mask": bias})["mask"])
    torch.testing.assert_close(found, scaled_dot_product_attention(x[..., 1:, :], x, x, attn_mask=bias))


def test_what_cannot_be_copied_is_refused():
    with pytest.raises(ValueError, match=r"cannot be copied for a second call .*lock"):
        copied_arguments(((SimpleNamespace(lock=threading.Lock()),), {}))


class Layer(nn.Module):
    layer_idx = 1

    def forward(self, x: Tensor, layer_past: object = None) -> Tensor:
        return x


class Network(nn.Module):
    def forward(self, x: Tensor, past_key_values: object = None, **rest: object) -> Tensor:
        return x


def _filled(*indices: int, cache=None):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    cache = transformers.DynamicCache() if cache is None else cache
    for index in indices:
        cache.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), index)
    return cache


def _static(*indices: int):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    config = transformers.LlamaConfig(hidden_size=3, num_attention_heads=1, num_hidden_layers=2)
    return _filled(*indices, cache=transformers.StaticCache(config=config, max_cache_len=4))


def _crossed(own=(), cross=()):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    return transformers.EncoderDecoderCache(_filled(*own), _filled(*cross))


PAIR = (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3))


@each_row(
    ("module", "make", "expected"),
    [
        (Network, lambda: None, False),
        (Network, tuple, False),
        (Network, lambda: (None, None), False),
        (Network, lambda: (PAIR, PAIR), True),
        (Network, _filled, False),
        (Network, lambda: _filled(0), True),
        (Network, _static, False),
        (Network, lambda: _static(0), True),
        (Network, _crossed, False),
        (Network, lambda: _crossed(own=[0]), True),
        (Network, lambda: _crossed(cross=[0]), True),
        (Layer, lambda: PAIR, True),
        (Layer, lambda: _filled(0), False),  # the tokens of this call, in the layer before
        (Layer, lambda: _filled(0, 1), True),
        (Layer, lambda: _static(0), False),
        (Layer, lambda: _static(0, 1), True),
        (Layer, lambda: torch.ones(20, 16), False),  # a table by the name of a cache
        (Layer, lambda: (torch.ones(20, 16), torch.ones(20, 16)), False),
        (Layer, lambda: SimpleNamespace(get_seq_length=lambda: 2), True),
        (Layer, lambda: SimpleNamespace(get_seq_length=lambda: 0), False),
    ],
)
def test_a_full_cache_is_told_from_an_empty_one(module, make, expected):
    x, cache, name = torch.ones(1, 2, 3), make(), "past_key_values" if module is Network else "layer_past"
    assert continues(module(), (x, cache), {}) is expected
    assert continues(module(), (x,), {name: cache}) is expected
    assert continues(module(), ({"inputs": x, name: cache},), {}) is expected
    assert continues(module(), (x, None), {"past": (x, x)}) is False  # no cache by its name
