"""Kept query rows: outside parameters and state dict, moved and copied with the layer, loaded from either layout."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import GPTNeoXConfig, GPTNeoXModel

from attention_modules.hosts.base import Swapped
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import FEW, HOSTS, built
from tests.rows import each_row

# One host for each way in which a query is held: joint rows, joint columns (Conv1D), a projection of its own.
HOLDERS = ["own", "timm-attention", "timm-rope-unfused", "mha", "gpt2", "bert", "llama"]


def swapped(host: str, mechanism: str, seed: int = 0) -> nn.Module:
    model = built(host, seed)
    name, options = FEW[mechanism]
    swap_attention(model, name, **options)
    return model


def output(host: str, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return HOSTS[host].run(model, None)


def kept_rows(model: nn.Module) -> list[torch.Tensor]:
    layers = [module for module in model.modules() if isinstance(module, Swapped)]
    return [part.rows_in(layer) for layer in layers for part in layer.dropped_query]


@pytest.mark.parametrize("host", HOLDERS)
def test_the_projection_shrinks(host: str) -> None:
    plain, model = built(host), swapped(host, "symmetric")
    lost = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters())
    bias = 0 if host == "llama" else 16
    assert lost == HOSTS[host].layers * (16 * 16 + bias)
    assert not [key for key in model.state_dict() if "query_" in key]
    assert len(kept_rows(model)) == HOSTS[host].layers * (1 if host == "llama" else 2)


@each_row("host", HOLDERS)
def test_kept_rows_are_no_buffers(host: str) -> None:
    plain, model = built(host), swapped(host, "symmetric")
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


def test_ddp_sends_no_kept_rows(tmp_path: Path) -> None:
    model = swapped("encoder", "symmetric")
    model.register_buffer("counted", torch.zeros(3))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        sent = wrapped.modules_buffers  # what each forward broadcasts
    finally:
        torch.distributed.destroy_process_group()
    assert any(tensor is model.counted for tensor in sent)
    assert not [tensor for tensor in sent for rows in kept_rows(model) if tensor.data_ptr() == rows.data_ptr()]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("host", HOLDERS)
def test_copies_are_whole_and_independent(host: str, clone: Callable) -> None:
    model = swapped(host, "symmetric")
    expected, twin = output(host, model), clone(model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    restore_attention(model)
    assert torch.equal(output(host, twin), expected)
    restore_attention(twin)
    assert torch.equal(output(host, twin), output(host, model))


def neox() -> nn.Module:
    """Whose joint projection is an nn.Linear."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return GPTNeoXModel(GPTNeoXConfig(vocab_size=20, **sizes))


@pytest.mark.parametrize("build", [neox, *(partial(built, host) for host in (*HOLDERS, "declared"))])
def test_what_could_be_reset_can_be(build: Callable[[], nn.Module]) -> None:
    plain, model = build(), build()
    swap_attention(model, "symmetric")
    for name, part in plain.named_modules():
        other = model.get_submodule(name)
        # That of nn.MultiheadAttention has another name, but where Lightning's demos were imported.
        reset = "_reset_parameters" if isinstance(part, nn.MultiheadAttention) else "reset_parameters"
        if hasattr(part, reset) and [*other.parameters(recurse=False)]:
            before = [each.clone() for each in other.parameters(recurse=False)]
            getattr(other, reset)()
            now = [*other.parameters(recurse=False)]
            assert all(each.isfinite().all() for each in now)
            assert isinstance(part, nn.LayerNorm) or not all(map(torch.equal, before, now)), name


@pytest.mark.parametrize("host", HOLDERS)
def test_kept_rows_follow_dtype_and_device(host: str) -> None:
    model = swapped(host, "symmetric").double()
    assert {rows.dtype for rows in kept_rows(model)} == {torch.float64}
    restore_attention(model)
    plain = built(host).double()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    meta = swapped(host, "symmetric").to("meta")
    assert all(tensor.is_meta for tensor in (*meta.buffers(), *kept_rows(meta)))
    assert all(rows.is_meta for rows in kept_rows(meta.to_empty(device="cpu"))), "without values they are none"


def on_meta(host: str) -> nn.Module:
    model = built(host).to("meta")
    swap_attention(model, "symmetric")
    return model


@pytest.mark.parametrize("host", HOLDERS)
def test_a_plain_checkpoint_assigned_to_a_model_on_meta_fills_the_kept_rows(host: str) -> None:
    source, model = built(host), on_meta(host)
    model.load_state_dict(source.state_dict(), assign=True, strict=False)
    assert not any(rows.is_meta for rows in kept_rows(model))
    restore_attention(model)
    assert all(torch.equal(model.get_parameter(name), given) for name, given in source.named_parameters())


@pytest.mark.parametrize("host", HOLDERS)
def test_a_swapped_checkpoint_assigned_to_a_model_on_meta_leaves_no_rows_to_restore(host: str) -> None:
    model = on_meta(host)
    model.load_state_dict(swapped(host, "symmetric").state_dict(), assign=True, strict=False)
    for part in [*model.parameters(), *model.buffers()]:  # rotary tables, which no checkpoint holds, stay on meta
        assert not (part.is_meta and isinstance(part, nn.Parameter))
    layer = next(module for module in model.modules() if isinstance(module, Swapped))
    layer.double().to("cpu")  # what moves the layer does not fail at rows without values
    with pytest.raises(AttentionSwapError, match=r"query rows .* are gone.*assigned to a model on the meta device"):
        restore_attention(model)
    model.load_state_dict(built(host).state_dict(), assign=True, strict=False)  # a plain one brings them
    assert len(restore_attention(model)) == HOSTS[host].layers


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("mechanism", ["symmetric", "scaled"])
@pytest.mark.parametrize("host", HOLDERS)
def test_plain_and_swapped_checkpoints_load_strictly(host: str, mechanism: str, assign: bool) -> None:
    source, model = built(host, seed=1), swapped(host, mechanism)
    given = {key: value.clone() for key, value in source.state_dict().items()}
    shapes = {key: value.shape for key, value in given.items()}
    model.load_state_dict(given, assign=assign)
    assert {key: value.shape for key, value in given.items()} == shapes  # the caller's dictionary is his
    expected = swapped(host, mechanism, seed=1)
    torch.testing.assert_close(output(host, model), output(host, expected))
    again = swapped(host, mechanism, seed=2)
    again.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(output(host, again), output(host, model))
    restore_attention(model)  # the plain checkpoint's query rows came along
    torch.testing.assert_close(output(host, model), output(host, source))


@each_row("host", HOLDERS)
def test_a_checkpoint_that_fits_neither_layout_is_refused(host: str) -> None:
    model = swapped(host, "symmetric")
    state = model.state_dict()
    short = {key: value for key, value in state.items() if key != next(reversed(state))}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(short)
    with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected key"):
        model.load_state_dict(
            {key: value.repeat(*[2] * value.dim()) for key, value in built(host).state_dict().items()}
        )
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        built(host).load_state_dict(state)


@pytest.mark.parametrize("host", HOLDERS)
def test_weight_averaging(host: str) -> None:
    model = swapped(host, "symmetric")
    average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0)
    average.update_parameters(model)
    old, new = swapped(host, "symmetric").state_dict(), average.module.state_dict()
    assert all(torch.allclose(new[key], old[key] + 1) for key, _ in model.named_parameters())
    assert torch.isfinite(output(host, average.module)).all()
    restore_attention(average.module)


def test_torch_save_of_a_whole_swapped_model() -> None:
    model, file = swapped("timm-attention", "symmetric"), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(output("timm-attention", again), output("timm-attention", model))


@each_row("host", HOLDERS)
def test_frozen_projections_stay_frozen(host: str) -> None:
    model = built(host).requires_grad_(False)
    swap_attention(model, "symmetric")
    restore_attention(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("host", HOLDERS)
def test_rows_without_values_are_refused_until_plain_weights_are_loaded(host: str) -> None:
    model, plain = swapped(host, "symmetric"), built(host).state_dict()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    with pytest.raises(AttentionSwapError, match=r"the kept query rows .* are gone"):
        restore_attention(model)
    model.load_state_dict(plain)
    restore_attention(model)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


@each_row(("host", "trains"), itertools.product(HOLDERS, [False, True]))
def test_restored_queries_train_as_their_layer_does_and_keep_their_marks(host: str, trains: bool) -> None:
    model = built(host).requires_grad_(not trains)
    for parameter in model.parameters():
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
    swap_attention(model, "symmetric")
    model.requires_grad_(trains).double()
    restore_attention(model)
    assert {parameter.requires_grad for parameter in model.parameters()} == {trains}
    assert all(getattr(parameter, "_no_weight_decay", False) for parameter in model.parameters())


@pytest.mark.parametrize("trains", [False, True])
def test_a_query_that_differs_from_its_layer_comes_back_as_it_was(trains: bool) -> None:
    model = built("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((".query." in name) == trains)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    swap_attention(model, "symmetric")
    restore_attention(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
