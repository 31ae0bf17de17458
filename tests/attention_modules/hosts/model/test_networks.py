"""Layers are counted within a network; copies get equal new Parameters, and what is frozen stays frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

from attention_modules.hosts import attention_layers
from attention_modules.hosts.discovery import survey
from attention_modules.swap import AttentionSwapError, restore_attention, swap_attention
from tests.attention_modules.hosts.cases import ALWAYS_CAUSAL, MECHANISMS, TOKENS, features, hugging_face
from tests.rows import each_row


def encoder(depth: int = 2, width: int = 16) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def pair(frozen: bool = True) -> nn.ModuleDict:
    """A student and its momentum teacher."""
    student = encoder()
    return nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(not frozen)})


def embedded(depth: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 16), encoder(depth))


def vit(depth: int = 2) -> nn.Module:
    return pytest.importorskip("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=depth)


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}
    text = {**sizes, "num_hidden_layers": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "num_hidden_layers": 3, "image_size": 32, "patch_size": 16}
    return hugging_face("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision)()


def bart() -> nn.Module:
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    return hugging_face("BartModel", "BartConfig", d_model=16, vocab_size=9, **sizes)()


def averaged() -> nn.ModuleDict:
    student = vit()
    return nn.ModuleDict({"net": student, "average": torch.optim.swa_utils.AveragedModel(student)})


def distilled() -> nn.ModuleDict:
    return nn.ModuleDict({"small": embedded(1), "large": embedded(3).requires_grad_(False)})


def joint_embedding() -> nn.ModuleDict:
    whole = pair()
    whole["predictor"] = encoder(1)
    return whole


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "one": (encoder, {"": 2}),
    "vit": (vit, {"": 2}),
    "encoder and decoder": (lambda: nn.Transformer(16, 4, 2, 2, 32), {"": 6}),
    "bart": (bart, {"": 6}),
    "backbone and head": (lambda: nn.ModuleDict({"backbone": vit(), "head": encoder(1)}), {"": 3}),
    "swin": (
        lambda: pytest.importorskip("timm").create_model("swin_tiny_patch4_window7_224", img_size=64, embed_dim=24),
        {"": 12},
    ),
    "teacher": (pair, {"student": 2, "teacher": 2}),
    "teacher in a list": (lambda: nn.ModuleList(pair().values()), {"0": 2, "1": 2}),
    "teacher below": (
        lambda: nn.ModuleDict({"model": pair(), "extra": encoder(1)}),
        {"model.student": 2, "model.teacher": 2, "": 1},
    ),
    "one layer": (
        lambda: nn.ModuleDict({"online": encoder().layers[0], "target": encoder().layers[0]}),
        {"online": 1, "target": 1},
    ),
    "average": (averaged, {"net": 2, "average": 2}),
    "predictor": (joint_embedding, {"student": 2, "teacher": 2, "predictor": 1}),
    "towers": (clip, {"text_model": 2, "vision_model": 3}),
    "towers of open_clip": (
        lambda: nn.ModuleDict({"visual": encoder(3), "transformer": encoder(2, 8), "embedding": nn.Embedding(9, 8)}),
        {"visual": 3, "transformer": 2},
    ),
    "captioner": (
        lambda: nn.ModuleDict({"image_encoder": encoder(1), "text_decoder": nn.Transformer(16, 4, 1, 1, 32).decoder}),
        {"": 3},
    ),
    "distilled": (distilled, {"small": 1, "large": 3}),
}


@pytest.mark.parametrize("title", NETWORKS)
def test_networks(title: str) -> None:
    build, expected = NETWORKS[title]
    found = survey(build())
    assert {network.name: len(network.layers) for network in found.networks} == expected
    assert sorted(name for network in found.networks for name in network.layers) == sorted(
        layer.name for layer in found.layers
    )


def test_layers_are_counted_within_each_network() -> None:
    model = clip()
    report = swap_attention(model, "sink", layers=[0, -1])
    chosen = [row.name.split(".")[0] + row.name.split(".")[3] for row in report]
    assert chosen == ["text_model0", "text_model1", "vision_model0", "vision_model2"]
    assert "2 networks, whose layers are counted apart: text_model (2 layers), vision_model (3 layers)" in str(report)
    found = attention_layers(model)
    assert [layer.spec.layer_index for layer in found] == [0, 1, 0, 1, 2]
    assert [layer.number for layer in found] == [0, 1, 2, 3, 4]
    with pytest.raises(AttentionSwapError, match=r"2 self-attention layers of network 'text_model' match .*where="):
        swap_attention(model, "sink", layers=[2])
    assert [row.name.split(".")[0] for row in swap_attention(model, "gated", where="vision*", layers=[2])] == [
        "vision_model"
    ]


@pytest.mark.parametrize("name", MECHANISMS)
def test_copies_stay_copies_and_frozen(name: str) -> None:
    mechanism, options = MECHANISMS[name]
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
    hidden = {"mask": mask, "is_causal": True} if name in ALWAYS_CAUSAL else {}
    for model in (pair(), nn.ModuleDict(reversed(pair().items()))):
        swap_attention(model, mechanism, **options)
        student, teacher = model["student"], model["teacher"]
        assert student.state_dict().keys() == teacher.state_dict().keys()
        for key, value in student.state_dict().items():
            assert torch.equal(value, teacher.state_dict()[key]), key
        assert all(parameter.requires_grad for parameter in student.parameters())
        assert not any(parameter.requires_grad for parameter in teacher.parameters())
        model.double().eval()
        with torch.no_grad():
            outs = [network(features().double(), **hidden) for network in (student, teacher)]
            torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)


@each_row("mechanism", ["gated", "differential", "dam"])
def test_copies_get_equal_parameters_in_two_calls_too(mechanism: str) -> None:
    options = {"num_tokens": 20} if mechanism == "dam" else {}
    model = pair()
    with pytest.warns(UserWarning, match="'student' and 'teacher' have equal layers"):
        swap_attention(model, mechanism, where="student*", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(model, mechanism, where="teacher*", **options)
    for one, other in zip(model["student"].parameters(), model["teacher"].parameters(), strict=True):
        assert torch.equal(one, other)
        assert not other.requires_grad


def test_networks_that_only_look_alike_get_parameters_of_their_own() -> None:
    model = nn.ModuleDict({"left": encoder(), "right": encoder()})
    swap_attention(model, "gated")
    gates = [model[side].layers[0].self_attn.mechanism.gate.weight for side in ("left", "right")]
    assert not torch.equal(*gates)


def test_what_a_frozen_twin_has_learned_is_its_own() -> None:
    teacher, model = encoder(), nn.ModuleDict({"student": encoder()})
    swap_attention(teacher, "sink")
    trained = teacher.layers[0].self_attn.mechanism.sink
    trained.data.fill_(7.0)
    model["teacher"] = teacher.requires_grad_(False)
    swap_attention(model, "sink", where="student*")
    assert not model["student"].layers[0].self_attn.mechanism.sink.any()
    assert bool((trained == 7.0).all())


@each_row("where", ["student*", ["student.layers.*"], lambda name, module: name.startswith("student")])
def test_a_twin_that_is_left_out_is_told(where: object) -> None:
    model = pair()
    with pytest.warns(UserWarning, match="'student' and 'teacher' have equal layers.*zipped Parameters") as caught:
        swap_attention(model, "gated", where=where)  # type: ignore[arg-type]
    assert caught[0].filename == __file__
    assert [hasattr(model[name].layers[0].self_attn, "mechanism") for name in model] == [True, False]


def test_frozen_networks_beside_one_that_trains_are_swapped_where_they_are_named() -> None:
    model = distilled()
    report = swap_attention(model, "gated")
    assert [row.name.split(".")[0] for row in report] == ["small"]
    assert "large (3 layers, frozen)" in str(report)
    assert all("frozen" in row.reason for row in report.skipped)
    assert [row.name for row in swap_attention(model, "sink", where="*.layers.0.self_attn")] == [
        "small.1.layers.0.self_attn"
    ]
    for where in ("large*", ["small*", "large*"], lambda name, module: True):
        swap_attention(model, "gated", where=where)  # type: ignore[arg-type]
        assert all(hasattr(layer.self_attn, "mechanism") for layer in model["large"][1].layers)
        assert not any(parameter.requires_grad for parameter in model["large"].parameters())
        restore_attention(model)
    assert len(swap_attention(model.requires_grad_(False), "gated")) == 4


@pytest.mark.parametrize("mechanism", ["sink", "gated", "differential", "position_bias"])
def test_new_parameters_train_where_their_layer_does(mechanism: str) -> None:
    options = {"num_tokens": 20} if mechanism == "position_bias" else {}
    model = encoder()
    model.layers[0].requires_grad_(False)
    model.layers[1].self_attn.requires_grad_(False)
    model.layers[1].self_attn.out_proj.bias.requires_grad_(True)  # one that trains is enough
    swap_attention(model, mechanism, **options)
    assert not any(parameter.requires_grad for parameter in model.layers[0].parameters())
    assert all(parameter.requires_grad for parameter in model.layers[1].self_attn.mechanism.parameters())
    swap_attention(model, mechanism, **options)  # the mechanism's own Parameters do not count
    assert not any(parameter.requires_grad for parameter in model.layers[0].parameters())


def test_averages_of_a_swapped_model_are_its_twin() -> None:
    model = averaged()
    swap_attention(model, "gated")
    average = model["average"]
    with torch.no_grad():
        for parameter in model["net"].parameters():
            parameter.add_(1.0)
    average.update_parameters(model["net"])  # zips Parameters: the first update copies
    for one, other in zip(model["net"].parameters(), average.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_frozen_network_of_another_depth_is_left_out() -> None:
    model, x = (
        nn.ModuleDict({"student": encoder(2), "teacher": encoder(4).requires_grad_(False)}),
        torch.randn(2, 5, 16),
    )
    before = model["teacher"](x)
    report = swap_attention(model, "entmax")
    assert [row.name.partition(".")[0] for row in report] == ["student", "student"]
    assert torch.equal(model["teacher"](x), before)


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_frozen_twin_under_a_number_is_a_network(drift: float) -> None:
    student = encoder(1)
    model = nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False)])
    for parameter in model[1].parameters():
        parameter.mul_(1 + drift)
    assert len(swap_attention(model, "gated", layers=[0])) == 2
    if not drift:
        x = torch.randn(2, 5, 16)
        torch.testing.assert_close(model[0](x), model[1](x))


def test_frozen_first_layers_are_no_network() -> None:
    model = encoder(4)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    assert [row.name for row in swap_attention(model, "entmax", layers=[3])] == ["layers.3.self_attn"]


def test_what_is_frozen_for_fine_tuning_stays_in_its_network() -> None:
    parts = nn.ModuleDict({"backbone": encoder(3).requires_grad_(False), "head": encoder(2)})
    assert len(swap_attention(parts, "entmax")) == 5
    stages = nn.ModuleList([encoder(2).requires_grad_(False), encoder(2), encoder(2)])
    assert [row.name for row in swap_attention(stages, "entmax", layers=[0])] == ["0.layers.0.self_attn"]


@pytest.mark.parametrize("names", [("critic1", "critic2"), ("branch1", "branch2"), ("0", "1"), ("actor", "critic")])
def test_members_of_an_ensemble_are_networks(names: tuple[str, str]) -> None:
    members = [timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2) for _ in names]
    report = swap_attention(nn.ModuleDict(dict(zip(names, members, strict=True))), "sink", layers=[0])
    assert [row.name for row in report] == [f"{name}.blocks.0.attn" for name in names]


def test_a_frozen_model_of_another_size_under_a_number_is_left_out() -> None:
    student, teacher = (
        timm.create_model(f"vit_{size}_patch16_224", img_size=32, depth=depth)
        for size, depth in (("tiny", 1), ("small", 2))
    )
    pair = nn.ModuleList([student, teacher.requires_grad_(False)])
    assert [row.name for row in swap_attention(pair, "sink")] == ["0.blocks.0.attn"]
