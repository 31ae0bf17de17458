"""Our own layer, which has a mechanism before any swap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from attention_modules.layers import SelfAttention
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import DIM, HEADS, TOKENS, features


def scaled() -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(DIM, HEADS, "scaled", num_tokens=TOKENS)
    torch.nn.init.normal_(layer.mechanism.s)
    return layer.eval()


def test_restore_brings_its_own_mechanism_back() -> None:
    layer = scaled()
    own, plain, keys = layer.mechanism, layer(features()), list(layer.state_dict())
    swap_attention(layer, "symmetric")
    swap_attention(layer, "rpc", iterations=2)
    assert not [key for key in layer.state_dict() if key.startswith("mechanism")]
    restore_attention(layer)
    assert layer.mechanism is own
    assert torch.equal(layer(features()), plain)
    assert list(layer.state_dict()) == keys


def test_its_own_mechanism_follows_dtype_and_train_flag() -> None:
    layer = scaled()
    swap_attention(layer, "softmax")
    layer.double().train()
    restore_attention(layer)
    assert layer.mechanism.s.dtype == torch.float64
    assert layer.mechanism.training


def test_a_checkpoint_from_before_the_swap_fills_its_own_mechanism() -> None:
    source, layer = scaled(), SelfAttention(DIM, HEADS, "scaled", num_tokens=TOKENS).eval()
    swap_attention(layer, "symmetric")
    layer.load_state_dict(source.state_dict())
    restore_attention(layer)
    assert torch.equal(layer(features()), source(features()))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_configured_layers_copy_when_swapped(clone) -> None:
    layer = SelfAttention.configured("rpc", iterations=2)(DIM, HEADS).eval()
    plain = layer(features())
    swap_attention(layer, "symmetric")
    twin = clone(layer)
    assert torch.equal(twin(features()), layer(features()))
    restore_attention(twin)
    assert torch.equal(twin(features()), plain)
    assert type(twin) is SelfAttention.configured("rpc", iterations=2)


def test_a_layer_built_without_a_query_cannot_get_one() -> None:
    layer = SelfAttention(DIM, HEADS, "symmetric")
    with pytest.raises(AttentionSwapError, match="built with SymmetricAttention and has no query projection"):
        swap_attention(layer, "softmax")
    weight = layer.qkv.weight
    swap_attention(layer, "rpc", iterations=2)
    with pytest.raises(AttentionSwapError, match="has no query projection"):
        swap_attention(layer, "softmax")
    restore_attention(layer)
    assert layer.qkv.weight is weight


def test_normalized_queries_cannot_be_dropped() -> None:
    layer = SelfAttention(DIM, HEADS, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    with pytest.raises(AttentionSwapError, match="q_norm"):
        swap_attention(layer, "symmetric")


class OwnForward(SelfAttention):
    """A subclass with a forward of its own."""

    def forward(self, x, attn_mask=None, is_causal=False):
        return x


def test_subclasses_with_their_own_forward_are_refused() -> None:
    with pytest.raises(AttentionSwapError, match="OwnForward is a SelfAttention with a forward of its own"):
        swap_attention(OwnForward(DIM, HEADS), "softmax")
