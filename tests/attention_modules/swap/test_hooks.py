"""Hooks of users: on Parameters that a swap would replace, and on modules that see attention maps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from attention_modules.swap import AttentionSwapError, make_observable, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import gpt2, hugging_face, token_ids
from tests.rows import each_row


def vit(fused: bool = False, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, **options)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def swin() -> nn.Module:
    model = pytest.importorskip("timm").create_model("swin_tiny_patch4_window7_224", img_size=64, embed_dim=24)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _stepped(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data - parameter.grad


def post_accumulate(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(_stepped)


def on_gradient(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: 2 * gradient)


def on_several(parameter: nn.Parameter) -> None:
    register_multi_grad_hook([parameter], lambda gradients: None)


@each_row(
    ("hook", "mechanism", "host"),
    itertools.product([post_accumulate, on_gradient, on_several], ["symmetric", "rpc"], ["encoder", "vit", "gpt2"]),
)
def test_a_hooked_parameter_is_not_replaced(host: str, mechanism: str, hook: Callable[[nn.Parameter], None]) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = {"encoder": lambda: layer, "vit": vit, "gpt2": gpt2()}[host]()
    for parameter in model.parameters():
        hook(parameter)
    before = dict(model.named_parameters())
    with pytest.raises(AttentionSwapError, match=r"has hooks \(.*test_hooks|has hooks \(torch.autograd.graph"):
        swap_attention(model, mechanism)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    swap_attention(model, "softmax")
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("again", [restore_attention, lambda model: swap_attention(model, "softmax")])
def test_a_hooked_parameter_does_not_take_its_query_back(again: Callable[[nn.Module], object]) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    swap_attention(model, "symmetric")
    handle = model.self_attn.in_proj_weight.register_hook(torch.zeros_like)
    with pytest.raises(AttentionSwapError, match=r"in_proj_weight has hooks \(torch.*zeros_like\)"):
        again(model)
    model(torch.randn(1, 5, 16)).sum().backward()
    assert not model.self_attn.in_proj_weight.grad.any()
    handle.remove()
    again(model)


def _maps(model: nn.Module, name: str) -> list[Tensor]:
    """What passes through the modules of this name."""
    seen: list[Tensor] = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == name:
            module.register_forward_hook(lambda module, args, out: seen.append(out))
    return seen


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("observed", [False, True])
def test_softmax_gives_its_map_to_hooks_as_the_plain_layer_does(training: bool, observed: bool) -> None:
    model = vit(attn_drop_rate=0.5).train(training)
    seen = _maps(model, "attn_drop")
    torch.manual_seed(1)
    plain = model(images())
    maps = list(seen)
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if observed:
            make_observable(model, [f"blocks.{index}.attn" for index in range(2)])
        else:
            swap_attention(model, "softmax")
    torch.manual_seed(1)
    assert torch.equal(model(images()), plain)
    assert len(seen) == len(maps) == 2
    assert all(torch.equal(one, other) for one, other in zip(seen, maps, strict=True))


def test_a_hook_changes_the_map_of_softmax() -> None:
    model = vit().eval()
    model.blocks[0].attn.attn_drop.register_forward_hook(lambda module, args, out: out.roll(1, -1))
    plain = model(images())
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(images()), plain)
    assert not torch.allclose(plain, vit().eval()(images()))


class Kept(nn.Module):
    """In the place of the dropout of maps, as tools of explanation put it there."""

    def forward(self, attn: torch.Tensor) -> torch.Tensor:
        self.attn = attn
        return attn


def test_another_module_in_the_place_of_the_dropout_gets_the_map() -> None:
    model = vit().eval()
    plain, kept = model(images()), Kept()
    model.blocks[0].attn.attn_drop = kept
    swap_attention(model, "softmax")
    torch.testing.assert_close(model(images()), plain)
    torch.testing.assert_close(kept.attn.sum(-1), torch.ones_like(kept.attn[..., 0]))
    with pytest.warns(UserWarning, match=r"attn_drop'.* saw the attention map, and see nothing"):
        swap_attention(model, "rpc")


def test_a_swapped_layer_takes_no_class_that_would_leave_its_mechanism_out() -> None:
    model = vit()
    swap_attention(model, "sink")
    kind = type(model.blocks[0].attn)
    with pytest.raises(AttentionSwapError, match="swapped, and as a Merged would compute without its SinkAttention"):
        model.blocks[0].attn.__class__ = type("Merged", (kind.plain_class,), {})
    assert type(model.blocks[0].attn) is kind
    model.blocks[0].attn.__class__ = type("Wrapped", (kind,), {})  # as FSDP2 and parametrizations do
    model.blocks[0].attn.__class__ = kind


def test_a_swap_that_silences_hooks_says_so() -> None:
    silenced: list[tuple[nn.Module, str, str]] = [(vit(), "attn_drop", "rpc"), (swin(), "softmax", "softmax")]
    for model, name, mechanism in silenced:
        _maps(model, name)
        with pytest.warns(UserWarning, match=rf"{name}'.* saw the attention map, and see nothing") as told:
            swap_attention(model, mechanism)
        assert told[0].filename == __file__


def test_hooks_that_saw_nothing_are_not_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, name in ((vit(fused=True), "attn_drop"), (gpt2()(), "attn_dropout"), (vit(), "proj_drop")):
            seen = _maps(model, name)
            swap_attention(model, "softmax")
        assert not seen
    gpt = gpt2()()
    seen = _maps(gpt, "resid_dropout")
    swap_attention(gpt, "softmax")
    gpt(token_ids(), use_cache=False)
    assert len(seen) == 1


def test_hooks_on_the_output_projection_see_no_more_than_in_the_plain_layer() -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    layer.out_proj.register_forward_hook(lambda module, args, output: output * 0.5)
    x = torch.randn(2, 5, 16)
    before = layer(x, x, x)[0]
    swap_attention(layer, "softmax")
    torch.testing.assert_close(layer(x, x, x)[0], before)


def test_a_layer_that_accelerate_offloads_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = gpt2(n_layer=1)()
    swap_attention(model, "symmetric")
    accelerate.cpu_offload(model, execution_device="cpu")
    for change in (restore_attention, lambda each: swap_attention(each, "gated")):
        with pytest.raises(AttentionSwapError, match="accelerate keeps the KeyValueConv1D's forward"):
            change(model)


def test_a_swapped_layer_behind_an_adapter_is_no_restored_one() -> None:
    peft = pytest.importorskip("peft")
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    swap_attention(model, "uniform")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["layers.0.self_attn"]))
    with pytest.raises(AttentionSwapError, match=r"cannot restore '.*self_attn\.base_layer'.*merge_and_unload"):
        restore_attention(adapted)


@pytest.mark.parametrize(("build", "name"), [(gpt2(n_layer=1), "c_attn"), (vit, "qkv")])
def test_hooks_on_a_joint_projection_are_refused_where_keys_would_take_the_place_of_queries(
    build: Callable[[], nn.Module], name: str
) -> None:
    model = build()
    _maps(model, name)
    with pytest.raises(AttentionSwapError, match=rf"its query projection '{name}' has hooks \(.*_maps"):
        swap_attention(model, "symmetric")
    swap_attention(model, "gated")


def test_hooks_on_a_layer_do_not_keep_its_query() -> None:
    model = pytest.importorskip("timm").create_model("beit_base_patch16_224", img_size=32, depth=1, embed_dim=48)
    seen = _maps(model, "attn")  # which has a Parameter for the query alone, its q_bias
    swap_attention(model, "symmetric")
    model.eval()(images())
    assert [tuple(each.shape) for each in seen] == [(2, 5, 48)]


def test_hooks_on_a_query_projection_that_is_dropped_are_refused() -> None:
    model = hugging_face("BertModel", "BertConfig", hidden_size=16, num_attention_heads=2, vocab_size=9)()
    model.encoder.layer[0].attention.self.query.register_full_backward_hook(lambda *_: None)
    with pytest.raises(AttentionSwapError, match="its query projection 'query' has hooks"):
        swap_attention(model, "symmetric")
    swap_attention(model, "entmax")


def test_maps_of_checkpointed_layers_are_made_again_and_none_where_the_plain_layer_gives_none() -> None:
    model = gpt2(n_layer=2)().train()
    seen: list[Any] = []
    swap_attention(model, "softmax")
    model.h[0].attn.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    model(token_ids())
    assert seen == [None]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (model(token_ids(), output_attentions=True)[0].sum() + model(token_ids())[0].sum()).backward()


@pytest.mark.parametrize("then", ["gated", "sink", "softmax"])
def test_hooks_on_a_mechanisms_parameters_are_not_lost(then: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    swap_attention(layer, "gated")
    fired: list[object] = []
    handles = [each.register_post_accumulate_grad_hook(fired.append) for each in layer.parameters()]
    with pytest.raises(AttentionSwapError, match=r"its mechanism's gate.weight has hooks "):
        swap_attention(layer, then)
    layer(torch.randn(1, 3, 16)).sum().backward()
    assert len(fired) == len(handles)
    for handle in handles:
        handle.remove()
    swap_attention(layer, then)


def _renamed(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    if f"{prefix}old" in state:
        state[f"{prefix}in_proj_weight"] = state.pop(f"{prefix}old")


def _reordered(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
    key = f"{prefix}in_proj_weight"
    state[key] = state[key].roll(16, 0)  # from keys, values and queries


class Converting(nn.MultiheadAttention):
    """One that converts older state dicts itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        _reordered(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("convert", [_renamed, _reordered, Converting])
def test_what_converts_older_state_dicts_comes_before_the_query_is_taken_out(convert: Any) -> None:
    plain = nn.MultiheadAttention(16, 2, batch_first=True)
    layer = (Converting if convert is Converting else nn.MultiheadAttention)(16, 2, batch_first=True)
    old = plain.state_dict()
    weight = old.pop("in_proj_weight")
    old |= {"old": weight} if convert is _renamed else {"in_proj_weight": weight.roll(-16, 0)}
    if convert is not Converting:
        layer.register_load_state_dict_pre_hook(convert)
    swap_attention(layer, "rpc")
    layer.load_state_dict(old)
    assert torch.equal(layer.in_proj_weight, weight[16:])
    restore_attention(layer)
    assert torch.equal(layer.in_proj_weight, weight)
    layer.load_state_dict(old)
    assert torch.equal(layer.in_proj_weight, weight)
