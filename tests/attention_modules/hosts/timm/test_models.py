"""timm's models: the count that the docs show, and real passes through each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_modules.swap import restore_attention, swap_attention
from tests.attention_modules.hosts.timm import exercise as timm_exercise
from tests.attention_modules.hosts.timm.maps import maps_of
from tests.attention_modules.hosts.timm.models import (
    MECHANISMS,
    VERSION,
    Row,
    count,
    families,
    layer_classes,
    on_meta,
    read,
    survey,
)

timm = pytest.importorskip("timm")

_SHALLOW = {"depth": 2}
# A small model of each family into which softmax goes, and what makes it smaller.
SMALL: dict[str, dict[str, Any]] = {
    "botnet26t_256": {},
    "beit_base_patch16_224": {**_SHALLOW, "img_size": 64},
    "caformer_s18": {},
    "cpubone_b0_bfrobust": {},
    "convit_tiny": {"local_up_to_layer": 1, **_SHALLOW},
    "crossvit_9_240": {},
    "csatv2": {},
    "davit_tiny": {},
    "deepseek_vit_412m": _SHALLOW,
    "deit_tiny_distilled_patch16_224": {**_SHALLOW, "img_size": 64},
    "efficientformer_l1": {},
    "eva02_tiny_patch14_224": {**_SHALLOW, "img_size": 56},
    "fastvit_sa12": {},
    "gcvit_xxtiny": {},
    "gemma4_vit_167m": _SHALLOW,
    "hiera_tiny_224": {},
    "levit_128s": {},
    "lowformer_b0": {},
    "mobilevit_xxs": {},
    "naflexvit_base_patch16_gap": _SHALLOW,
    "nest_tiny": {},
    "nextvit_small": {},
    "pit_ti_224": {},
    "pvt_v2_b0": {},
    "qwen3_vit_88m": _SHALLOW,
    "sam2_hiera_tiny": {},
    "samvit_base_patch16_224": {**_SHALLOW, "global_attn_indexes": (1,)},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_tiny_window8_256": {},
    "swinv2_cr_tiny_224": {},
    "test_maxvit": {},
    "test_coatnet": {},
    "test_vit": {},
    "test_vit_relpos": {},
    "tiny_vit_5m_224": {},
    "tnt_s_patch16_224": _SHALLOW,
    "twins_svt_small": {},
    "visformer_tiny": {},
    "vit_small_r26_s32_224": _SHALLOW,
    "vitamin_small_224": {},
    "volo_d1_224": {},
}
# Images of fewer pixels for models that take any size.
SIDES = {"deepseek_vit_412m": 126, "gemma4_vit_167m": 96, "qwen3_vit_88m": 96, "sam2_hiera_tiny": 224}
FAMILIES = sorted({row.family for row in read() if row.takes("softmax") and not row.by_name})
CHEAP = (
    "test_vit",
    "eva02_tiny_patch14_224",
    "swin_tiny_patch4_window7_224",
    "levit_128s",
    "xcit_nano_12_p16_224",
    "lowformer_b0",
)


def current(row: Row) -> bool:
    """Whether counting now gives the same."""
    return count(row.model, on_meta(row.model)) == replace(row, maps="")


@pytest.fixture(autouse=True)
def _the_counted_version() -> None:
    if timm.__version__ != VERSION:
        pytest.skip(f"the count is of timm {VERSION}, not {timm.__version__}")


def test_as_many_models_as_the_project_set_out_for() -> None:
    rows = read()
    assert len({row.model for row in rows}) == len(rows) >= 683
    assert sum(row.takes("softmax") for row in rows) >= 600
    assert sum(row.takes("symmetric") for row in rows) >= 250
    assert sum(row.takes("rpc") for row in rows) >= 250


def test_maps_are_those_that_layers_write_out_without_fused_kernels() -> None:
    rows = read()
    assert sum(row.same_maps for row in rows) >= 550
    assert all(row.maps for row in rows if row.takes("softmax") and not row.by_name)


@pytest.mark.parametrize("model", CHEAP)
def test_a_few_models_have_the_maps_that_were_counted(model: str) -> None:
    (row,) = (row for row in read() if row.model == model)
    assert row.by_name or float(maps_of(row, {})) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_has_the_maps_that_were_counted(family: str) -> None:
    done: dict[str, float | str] = {}
    rows = (row for row in read() if row.family == family and row.same_maps)
    assert not [row.model for row in rows if not replace(row, maps=maps_of(row, done)).same_maps]


def test_what_is_not_swapped_has_a_reason() -> None:
    for row in read():
        for mechanism in MECHANISMS:
            assert getattr(row, mechanism), row
        assert "no host knows" not in " ".join((row.softmax, row.symmetric, row.rpc, row.left)), row


@pytest.mark.parametrize("model", CHEAP)
def test_a_few_models_are_as_they_were_counted(model: str) -> None:
    (row,) = (row for row in read() if row.model == model)
    assert current(row)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_every_model_is_as_it_was_counted(family: str) -> None:
    assert survey(family) == [replace(row, maps="") for row in read() if row.family == family]


def test_every_counted_family_is_one_of_timms() -> None:
    assert {row.family for row in read()} <= set(families())


def test_each_family_has_a_small_model() -> None:
    rows = {row.model: row for row in read()}
    assert sorted({rows[model].family for model in SMALL}) == FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_of_each_family_trains(name: str) -> None:
    (row,) = (row for row in read() if row.model == name)
    assert current(row)
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL[name])
    for key, parameter in model.named_parameters():
        if parameter.dim() < 2 or "table" in key or "biases" in key:  # what starts at zero must count too
            nn.init.normal_(parameter, mean=float(parameter.flatten()[0] == 1), std=0.1)
    side = SIDES.get(name, SMALL[name].get("img_size", model.default_cfg["input_size"][-1]))
    image = torch.randn(2, 3, side, side)
    _settle_statistics(model, image)
    check(model, row, image)


def _settle_statistics(model: nn.Module, image: Tensor) -> None:
    """Batch norms that know their input, without which activations, and with them rounding, grow with depth."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # the average of all batches: this one
    model.train()
    with torch.no_grad():
        model(image)


def check(model: nn.Module, row: Row, image: Tensor) -> None:
    """Softmax changes nothing, and each mechanism that the count has swapped in gives finite gradients."""
    model.eval()
    with torch.no_grad():
        plain = model(image)
        swap_attention(model, "softmax")
        torch.testing.assert_close(model(image), plain, atol=1e-5, rtol=1e-5)
        restore_attention(model)
        assert torch.equal(model(image), plain)
    for mechanism in filter(row.takes, MECHANISMS):
        swap_attention(model, mechanism)
        model.train()
        model.zero_grad()
        model(image).square().mean().backward()
        for layer in layers(model):
            for key, parameter in layer.named_parameters():
                assert parameter.grad is not None, key
                assert parameter.grad.isfinite().all(), key
        model.eval()
        restore_attention(model)


def layers(model: nn.Module) -> list[nn.Module]:
    """The swapped layers."""
    return [module for module in model.modules() if hasattr(module, "mechanism")]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_every_model_at_its_true_size(family: str) -> None:
    """One of a kind: the layer as its model calls it, on real tensors (few tokens where nothing fixes their number)."""
    done: set[str] = set()
    for row in read():
        if row.family != family or not row.takes("softmax") or row.by_name:
            continue
        model = on_meta(row.model)
        assert layer_classes(model)
        for key, call in timm_exercise.calls(model).items():
            if key in done:
                continue
            done.add(key)
            for mechanism, problem in timm_exercise.exercise(call).items():
                refused = not row.takes(mechanism) and problem.startswith("refused")
                assert refused or not problem, f"{row.model}, {mechanism}: {problem}"
    assert done
