"""Layers are counted within a network; copies get equal new Parameters, and what is frozen stays frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn
from torchmetrics import Metric

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


def blt() -> nn.Module:
    """A frozen model behind those that train, all in series."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    parts = {f"{part}_config": sizes for part in ("encoder", "decoder", "global", "patcher")}
    return hugging_face("BltModel", "BltConfig", encoder_hash_byte_group_vocab=9, **parts)()


def averaged() -> nn.ModuleDict:
    student = vit()
    return nn.ModuleDict({"net": student, "average": torch.optim.swa_utils.AveragedModel(student)})


def distilled() -> nn.ModuleDict:
    return nn.ModuleDict({"small": embedded(1), "large": embedded(3).requires_grad_(False)})


def joint_embedding() -> nn.ModuleDict:
    whole = pair()
    whole["predictor"] = encoder(1)
    return whole


def block(width: int = 16) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)


class InSeries(nn.Module):
    """Its parts run one after the other, in order of their names, as in U-ViT or a factorised ViViT."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            for each in part if isinstance(part, nn.ModuleList) else [part]:
                x = each(x)
        return x


class Gated(nn.Module):
    """A block whose feed-forward part names the projection back second, as Llama's first code did."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)
        self.w1, self.w2, self.w3 = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)


def u_vit(copied: bool = False) -> InSeries:
    one = block()
    made = (copy.deepcopy(one) if copied else block() for _ in range(5))
    first, second, middle, fourth, fifth = made
    return InSeries(
        in_blocks=nn.ModuleList([first, second]), mid_block=middle, out_blocks=nn.ModuleList([fourth, fifth])
    )


def factorised(copied: bool = False) -> InSeries:
    """Two encoders in series; nn.TransformerEncoder copies its layer, so that one layer makes them equal."""
    layer = block()
    return InSeries(
        **{name: nn.TransformerEncoder(layer if copied else block(), 2) for name in ("spatial", "temporal")}
    )


def lists(lower: str, upper: str, depth: int = 4, frozen: int = 0) -> InSeries:
    """Two lists of blocks in series, of which one is frozen."""
    torch.manual_seed(0)
    parts = [nn.Sequential(*(block() for _ in range(length))) for length in (depth, 2)]
    parts[frozen].requires_grad_(False)
    return InSeries(**dict(zip((lower, upper), parts, strict=True)))


def gated_stages(*names: str) -> InSeries:
    return InSeries(**{name: nn.Sequential(nn.LayerNorm(16), Gated(), Gated()) for name in names})


def projected(conv: bool = False) -> nn.Module:
    """A network of its own: it takes 3 features, and gives 4."""
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4) if conv else nn.Linear(3, 16), encoder(), nn.Linear(16, 4))


def upsampling() -> nn.Module:
    """Takes a skip beside its input, as the second half of a U-Net does."""
    return nn.Sequential(nn.Linear(32, 16), encoder())


def drawn_apart(first: str, second: str, frozen: int) -> nn.ModuleDict:
    """Two encoders of other values, one of them frozen."""
    parts = [nn.TransformerEncoder(block(), 2) for _ in range(2)]
    parts[frozen].requires_grad_(False)
    return nn.ModuleDict(dict(zip((first, second), parts, strict=True)))


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
    "patcher": (blt, {"": 6}),
    "u-vit": (u_vit, {"": 5}),
    "u-vit of one block": (lambda: u_vit(copied=True), {"": 5}),
    "u-vit and its average": (
        lambda: nn.ModuleDict({"net": (net := u_vit()), "ema": copy.deepcopy(net)}),
        {"net": 5, "ema": 5},
    ),
    "factorised": (factorised, {"": 4}),
    "factorised, of one layer": (lambda: factorised(copied=True), {"": 4}),
    "factorised, gated": (lambda: gated_stages("spatial", "temporal"), {"": 4}),
    "gated stages": (lambda: gated_stages("stage1", "stage2"), {"": 4}),
    "halves of a u-net": (lambda: InSeries(first=upsampling(), second=upsampling()), {"": 4}),
    "frozen list": (lambda: lists("frozen_blocks", "blocks"), {"": 6}),
    "frozen list of equal length": (lambda: lists("frozen_blocks", "blocks", 2), {"": 4}),
    "frozen list behind": (lambda: lists("blocks", "frozen_blocks", 2, frozen=1), {"": 4}),
    "drawn teacher first": (lambda: drawn_apart("teacher", "student", 0), {"teacher": 2, "student": 2}),
    "momentum encoder first": (
        lambda: drawn_apart("momentum_encoder", "encoder", 0),
        {"momentum_encoder": 2, "encoder": 2},
    ),
    "queries and keys": (lambda: drawn_apart("encoder_q", "encoder_k", 1), {"encoder_q": 2, "encoder_k": 2}),
    "teacher's list": (
        lambda: lists("student_blocks", "teacher_blocks", 2, frozen=1),
        {"student_blocks": 2, "teacher_blocks": 2},
    ),
    "teacher's list first": (
        lambda: lists("teacher_blocks", "student_blocks"),
        {"teacher_blocks": 4, "student_blocks": 2},
    ),
    "copied encoder": (
        lambda: nn.ModuleDict({"net": (net := nn.Sequential(block(), block())), "slow": copy.deepcopy(net)}),
        {"net": 2, "slow": 2},
    ),
    "copied layer": (
        lambda: nn.ModuleDict({"net": (net := block()), "slow": copy.deepcopy(net).requires_grad_(False)}),
        {"net": 1, "slow": 1},
    ),
    "policy and value": (
        lambda: nn.ModuleDict({"policy": projected(), "value": projected()}),
        {"policy": 2, "value": 2},
    ),
    "two that see": (lambda: nn.ModuleList([projected(conv=True), projected(conv=True)]), {"0": 2, "1": 2}),
}


@pytest.mark.parametrize("title", NETWORKS)
def test_networks(title: str) -> None:
    build, expected = NETWORKS[title]
    found = survey(build())
    assert {network.name: len(network.layers) for network in found.networks} == expected
    assert sorted(name for network in found.networks for name in network.layers) == sorted(
        layer.name for layer in found.layers
    )


@pytest.mark.parametrize("build", [u_vit, factorised])
@pytest.mark.parametrize("index", [0, 3, -1])
def test_layers_in_series_are_counted_through(build: Callable[[], nn.Module], index: int) -> None:
    model = build()
    by_hand = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    assert [layer.spec.layer_index for layer in attention_layers(model)] == [*range(len(by_hand))]
    assert {layer.network for layer in attention_layers(model)} == {""}
    assert [row.name for row in swap_attention(model, "sink", layers=[index])] == [by_hand[index]]


@pytest.mark.parametrize("where", ["spatial*", "*temporal*"])
def test_parts_in_series_are_no_copies_to_be_told_of(where: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(swap_attention(factorised(), "gated", where=where)) == 2


@pytest.mark.parametrize("layers", [None, [0], [5]])
def test_a_frozen_list_in_series_is_swapped_under_any_name(layers: list[int] | None) -> None:
    models = {name: lists(name, f"{other}blocks") for name, other in {"lower": "upper_", "frozen_blocks": ""}.items()}
    reports = [swap_attention(model, "sigmoid", layers=layers) for model in models.values()]
    places = [[row.name.partition(".")[2] for row in report] for report in reports]
    assert places[0] == places[1]
    assert len(places[0]) == (6 if layers is None else 1)
    torch.testing.assert_close(*(model(features()) for model in models.values()))


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


@pytest.mark.parametrize("below", [False, True])
def test_a_teacher_of_another_depth_is_left_out_before_it_is_frozen(below: bool) -> None:
    pair = nn.ModuleDict({"student": encoder(2), "teacher": encoder(4)})
    model = nn.ModuleDict({"model": pair}) if below else pair
    report = swap_attention(model, "sigmoid")
    assert [row.name.rpartition("student")[2] for row in report] == [".layers.0.self_attn", ".layers.1.self_attn"]
    assert "a teacher or a metric, beside others: swapped where" in str(report)
    assert len(swap_attention(model, "sink", where=["*student.*", "*teacher.*"])) == 6
    assert len(swap_attention(pair["teacher"], "sigmoid")) == 4


@pytest.mark.parametrize("names", [("teacher", "pool"), ("encoder", "teacher_forcing"), ("teacher_head", "body")])
def test_what_trains_is_no_teacher_without_a_student(names: tuple[str, str]) -> None:
    model = nn.ModuleDict({names[0]: encoder(2), names[1]: encoder(1)})
    assert len(swap_attention(model, "sigmoid")) == 3


def test_a_metric_keeps_its_network() -> None:
    class Distance(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.features = encoder(2)

        def update(self) -> None: ...

        def compute(self) -> None: ...

    distance = Distance()
    shared = nn.ModuleDict({"distance": distance, "net": distance.features, "head": encoder(1)})
    assert len(swap_attention(shared, "sink")) == 3  # the model's own network, which a metric has too
    model = nn.ModuleDict({"net": encoder(2), "head": encoder(1), "distance": Distance()})
    assert {row.name.partition(".")[0] for row in swap_attention(model, "sigmoid")} == {"net", "head"}
    assert len(swap_attention(model, "sigmoid", where="distance.*")) == 2
    assert len(swap_attention(model["distance"], "sink")) == 2


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


@pytest.mark.parametrize("moved", [0.0, 0.01])
def test_keys_in_front_of_queries_are_a_network_by_their_names(moved):
    """MoCo's keys before its queries, also where the queries' weights were loaded since."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    model = nn.Module()
    queries = Encoder()
    model.encoder_k, model.encoder_q = copy.deepcopy(queries).requires_grad_(False), queries
    for parameter in queries.parameters():
        parameter.data += moved
    report = swap_attention(model, "softmax", layers=[0])
    assert [row.name for row in report] == [f"encoder_{each}.layers.0.self_attn" for each in "kq"]
