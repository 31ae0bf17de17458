"""Variants of recipes: named RECIPE/VARIANT, and in comparisons."""

from pathlib import Path

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.cli.arguments import without_variants
from lightning_tasks.cli.asked import expand_recipe_names
from lightning_tasks.compare.cell import Cell
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes import (
    check_recipe,
    is_comparison,
    read_settings,
    shipped_recipes,
)
from lightning_tasks.recipes.variants import Variant, find_variant, read_variants
from tests.lightning_tasks.demo import DemoModule

RECIPE = """\
# summary: a demonstration
model:
  class_path: tests.lightning_tasks.demo.DemoModule
  init_args: {width: 8}
trainer: {max_steps: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
variants:
  wide:
    model.width: 32
  narrow width: {model.width: 4}
"""
VARIED = [recipe for recipe in shipped_recipes() if recipe.variants]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "demo.yaml"
    path.write_text(RECIPE)
    return path


def test_a_name_chooses_a_variant(recipe):
    assert find_variant(str(recipe)) == Variant("demo", str(recipe))
    assert find_variant(f"{recipe}/wide") == Variant("demo_wide", str(recipe), ("--model.width=32",))
    assert expand_recipe_names(["fit", f"--config={recipe}/narrow width", "--seed_everything", "1"]) == [
        "fit", f"--config={recipe}", "--model.width=4", "--seed_everything", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "says"), [("wdie", "'wdie'; the nearest are wide"), ("zz", "'zz'; they are wide, narrow width")]
)
def test_an_unknown_variant_names_the_nearest(recipe, name, says, capsys):
    with pytest.raises(UsageError, match=rf"demo\.yaml has no variant {says}"):
        find_variant(f"{recipe}/{name}")
    with pytest.raises(SystemExit):
        main(["fit", "--config", f"{recipe}/{name}"])
    assert says in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_recipe_without_variants_has_none(recipe):
    recipe.write_text("model: {class_path: x}\n")
    with pytest.raises(UsageError, match="has no variant 'wide'; it has none"):
        find_variant(f"{recipe}/wide")


@pytest.mark.parametrize("variants", ["[wide]", "{wide: 1}", "null"])
def test_variants_of_another_shape_are_refused(recipe, variants):
    recipe.write_text(f"model: {{class_path: x}}\nvariants: {variants}\n")
    with pytest.raises(UsageError, match=r"demo\.yaml: `variants` must be"):
        check_recipe(recipe, read_settings(recipe))


def test_a_fit_of_a_variant_saves_a_complete_configuration_in_a_folder_of_its_own(recipe):
    later = recipe.with_name("later.yaml")
    later.write_text("trainer: {max_steps: 2}\n")
    main(["fit", "--config", f"{recipe}/wide", "--config", str(later), "--trainer.log_every_n_steps=1"])
    saved = yaml.safe_load(Path("runs/demo_wide/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["width"] == 32
    assert (saved["trainer"]["max_steps"], saved["trainer"]["log_every_n_steps"]) == (2, 1)
    assert "variants" not in saved
    checkpoint = next(Path("runs/demo_wide/version_0").rglob("*.ckpt"))
    assert DemoModule.load_from_checkpoint(checkpoint).hparams["width"] == 32
    main(["validate", "--config", f"{recipe}/wide", "--ckpt_path", "last"])
    assert not Path("runs/demo").exists()


def test_without_variants_values_stay_as_they_are_written():
    text = 'model: {rate: 1e-3, text: "1", none: null, same: &a [1.0], again: *a}\nvariants: {a: {b: 1}}\n'
    assert yaml.safe_load(without_variants(text)) == {"model": yaml.safe_load(text)["model"]}
    assert "1e-3" in without_variants(text)
    assert without_variants("- variants") == "- variants"


@pytest.mark.parametrize("shipped", VARIED, ids=lambda each: each.name)
def test_the_head_of_a_recipe_says_what_each_variant_is(shipped):
    settings = read_settings(shipped.path)
    assert list(shipped.variants) == list(settings["variants"])
    assert not is_comparison(settings)


# -- with comparisons --------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(recipe):
    path = recipe.with_name("compared.yaml")
    path.write_text(
        f"base: {recipe}/wide\nsettings: {{trainer.max_steps: 3}}\n"
        "variants: {plain: null, a/b: {model.init_bias: true}}\n"
    )
    return path


def test_a_comparison_takes_variants_of_recipes(recipe, comparison):
    wide, small = "--model.width=32", "--trainer.max_steps=3"
    assert read_variants(f"{recipe}/wide") == [find_variant(f"{recipe}/wide")]
    assert read_variants(str(comparison)) == [
        Variant("plain", str(recipe), (wide, small)),
        Variant("a/b", str(recipe), (wide, small, "--model.init_bias=true")),
    ]


def test_one_variant_of_a_comparison_can_be_fitted(recipe, comparison):
    assert find_variant(f"{comparison}/a/b") == Variant(
        "compared_a_b", str(recipe), ("--model.width=32", "--trainer.max_steps=3", "--model.init_bias=true")
    )
    with pytest.raises(UsageError, match=r"attnswap compare.*COMPARISON/VARIANT"):
        find_variant(str(comparison))


def test_a_comparison_of_a_comparison_is_refused(comparison):
    comparison.write_text(f"base: {comparison}/plain\nvariants: {{plain: null}}\n")
    with pytest.raises(UsageError, match=r"its base .* is a comparison"):
        read_variants(str(comparison))


def test_another_variant_of_the_file_makes_no_other_cell(recipe, tmp_path):
    (variant,) = read_variants(str(recipe))
    cell = Cell(variant.name, variant.config, variant.overrides, 0, str(tmp_path))
    before = cell.fingerprint
    recipe.write_text(recipe.read_text() + "  further: {model.width: 2}\n")
    assert cell.fingerprint == before
