"""What carries over a swap and back: values, dtype, device, mode, and Parameters that are shared."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from attention_modules.layers import SelfAttention
from attention_modules.mechanism import AttentionMechanism
from attention_modules.swap import (
    AttentionSwapError,
    restore_attention,
    swap_attention,
)
from tests.attention_modules.swap.models import (
    ALL,
    DIM,
    HEADS,
    Block,
    Noisy,
    NoisyWithoutQuery,
    Pyramid,
    mha,
    names,
    state_of,
)


def test_state_carries_over() -> None:
    model = Pyramid().double().eval()
    model.blocks[0].attn.in_proj_weight.requires_grad_(False)
    model.blocks[0].attn.in_proj_bias._no_weight_decay = True
    rng = torch.get_rng_state()
    swap_attention(model, NoisyWithoutQuery)
    assert torch.equal(torch.get_rng_state(), rng)
    for block in model.blocks:
        assert block.attn.mechanism.noise.dtype == block.attn.mechanism.count.dtype == torch.float64
        assert not block.attn.mechanism.training
    assert not torch.equal(model.blocks[0].attn.mechanism.noise, model.blocks[1].attn.mechanism.noise)
    assert not model.blocks[0].attn.in_proj_weight.requires_grad
    assert model.blocks[1].attn.in_proj_weight.requires_grad
    assert model.blocks[0].attn.in_proj_bias._no_weight_decay
    assert [block.attn.mechanism.spec.layer_index for block in model.blocks] == [0, 1, 2]
    restore_attention(model)
    assert not model.blocks[0].attn.in_proj_weight.requires_grad
    swap_attention(model.train(), Noisy)
    assert model.blocks[0].attn.mechanism.training


def test_meta_device_swaps() -> None:
    with torch.device("meta"):
        model = Pyramid()
    swap_attention(model, NoisyWithoutQuery)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_parameters_stay_the_same_objects_where_the_query_is_used() -> None:
    model = Pyramid()
    before = dict(model.named_parameters())
    swap_attention(model, Noisy)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert sorted(set(after) - set(before)) == [f"{name}.mechanism.noise" for name in ALL]


def test_swapping_again_replaces_and_restore_returns_to_the_original() -> None:
    model, x = Pyramid().eval(), torch.randn(2, 3, DIM)
    plain, before = model(x), [type(module) for module in model.modules()]
    for mechanism in (Noisy, NoisyWithoutQuery, "softmax", NoisyWithoutQuery, NoisyWithoutQuery):
        swap_attention(model, mechanism)
    assert len([module for module in model.modules() if isinstance(module, AttentionMechanism)]) == 3
    kept = model.blocks[0].attn.in_proj_weight
    swap_attention(model, NoisyWithoutQuery)
    assert model.blocks[0].attn.in_proj_weight is kept
    assert restore_attention(model) == ALL
    assert torch.equal(model(x), plain)
    assert [type(module) for module in model.modules()] == before
    assert restore_attention(model) == []


def test_restore_after_training_has_the_current_keys_and_values_with_the_kept_query() -> None:
    model = Block()
    whole = model.attn.in_proj_weight.detach().clone()
    swap_attention(model, NoisyWithoutQuery)
    with torch.no_grad():
        model.attn.in_proj_weight.add_(1.0)
    restore_attention(model)
    assert torch.equal(model.attn.in_proj_weight[:DIM], whole[:DIM])
    assert torch.equal(model.attn.in_proj_weight[DIM:], whole[DIM:] + 1)


def test_a_shared_layer_is_swapped_once_and_found_by_either_name() -> None:
    model = nn.Module()
    model.first = mha()
    model.second, model.third = model.first, mha()
    report = swap_attention(model, NoisyWithoutQuery, where="second")
    assert names(report) == ["first"]
    assert model.second is model.first
    assert names(swap_attention(model, "softmax", exclude="second")) == ["third"]


def test_tied_projections_are_refused_where_the_query_is_dropped() -> None:
    model = nn.ModuleList([mha(), mha()])
    model[1].in_proj_weight = model[0].in_proj_weight
    with pytest.raises(AttentionSwapError, match="in_proj_weight is tied to another module"):
        swap_attention(model, NoisyWithoutQuery)
    assert len(swap_attention(model, Noisy)) == 2


def test_a_projection_that_two_layers_share_is_refused_where_the_query_is_dropped() -> None:
    model = nn.ModuleList([SelfAttention(DIM, HEADS), SelfAttention(DIM, HEADS)])
    model[1].qkv = model[0].qkv
    before = state_of(model)
    with pytest.raises(AttentionSwapError, match=r"cannot swap '0': its qkv.weight is tied .*\(1\.qkv\.weight\)"):
        swap_attention(model, "symmetric")
    assert state_of(model) == before
    assert len(swap_attention(model, "softmax")) == 2


def test_a_layer_that_stands_in_two_places_is_no_tie() -> None:
    shared = Block()
    model = nn.Sequential(shared, shared)
    assert names(swap_attention(model, NoisyWithoutQuery)) == ["0.attn"]
    x = torch.randn(1, 3, DIM)
    assert torch.isfinite(model(x)).all()
    assert restore_attention(model) == ["0.attn"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kept_rows_move_to_the_gpu() -> None:
    model, x = Block().cuda().eval(), torch.randn(1, 3, DIM).cuda()
    plain, rng = model(x), torch.cuda.get_rng_state()
    swap_attention(model, NoisyWithoutQuery)
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    assert model.attn.mechanism.noise.is_cuda
    restore_attention(model.cpu().cuda())
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("mechanism", ["rpc", "scaled"])
def test_a_model_swapped_in_inference_mode_trains(mechanism: str) -> None:
    model = nn.Sequential(*(SelfAttention(8, 2, num_tokens=5) for _ in range(2)))
    with torch.inference_mode():
        swap_attention(model, mechanism)
    model(torch.randn(2, 5, 8)).sum().backward()
    with torch.inference_mode():
        restore_attention(model)
    model(torch.randn(2, 5, 8)).sum().backward()


def test_plain_weights_beside_what_was_trained_are_told_of() -> None:
    model, plain = Block(), Block().state_dict()
    swap_attention(model, Noisy)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(plain)  # the mechanism is as it was made
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.randn(1, 3, DIM)).sum() + model.attn.mechanism.noise.sum()).backward()
    optimizer.step()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with pytest.warns(UserWarning, match="has nothing for the Noisy, which has changed since the swap"):
            model.load_state_dict(plain)
    assert torch.equal(model.attn.mechanism.noise, trained["attn.mechanism.noise"])
    model.load_state_dict(trained)
    swap_attention(model, Noisy)
    model.load_state_dict(plain)


@pytest.mark.parametrize("mechanism", ["sink", "gated"])
def test_plain_weights_make_an_emptied_mechanism_new(mechanism: str) -> None:
    model, plain, x = Block(), Block().state_dict(), torch.randn(1, 3, DIM)
    expected = Block()
    expected.load_state_dict(plain)
    swap_attention(expected, mechanism, std=0.0)
    swap_attention(model, mechanism, std=0.0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # as whatever stood in the memory
    drawn = torch.get_rng_state()
    model.load_state_dict(plain)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(model(x), expected(x))
    nn.init.constant_(next(model.attn.mechanism.parameters()), 3.0)
    with pytest.warns(UserWarning, match="has changed since the swap"):
        model.load_state_dict(plain)
    model.to_empty(device="cpu")
    model.attn.mechanism.reset_parameters()
    nn.init.constant_(next(model.attn.mechanism.parameters()), 3.0)
    model.load_state_dict(plain)
    assert bool((next(model.attn.mechanism.parameters()) == 3.0).all())


def test_a_mechanism_is_no_float8_where_weights_are_kept_so() -> None:
    model = Block().to(torch.float8_e4m3fn)  # as diffusers' layerwise casting keeps them
    swap_attention(model, "sink")
    assert model.attn.mechanism.sink.dtype == torch.float32


def test_a_mechanism_is_made_where_the_model_around_it_is_not() -> None:
    from lightning.fabric.utilities.init import _EmptyInit

    expected = Block()
    torch.manual_seed(1)
    swap_attention(expected, "gated")
    with _EmptyInit():  # Trainer.init_module(empty_init=True): a checkpoint is to fill the model
        model = Block()
        torch.manual_seed(1)
        swap_attention(model, "gated")
    assert torch.equal(model.attn.mechanism.gate.weight, expected.attn.mechanism.gate.weight)
    assert torch.equal(model.attn.mechanism.gate.bias, expected.attn.mechanism.gate.bias)


@pytest.mark.parametrize("mechanism", ["gated", "forgetting"])
def test_gates_start_as_the_mechanism_says_where_tools_reset_each_module(mechanism: str) -> None:
    from lightning.fabric.utilities.init import _materialize_distributed_module

    model = Block()
    swap_attention(model, mechanism, bias=30.0, std=0.0)
    _materialize_distributed_module(model.to("meta"), torch.device("cpu"))
    gate = model.attn.mechanism.gate
    assert bool((gate.bias == 30.0).all())
    assert not gate.weight.any()
