"""A comparison goes on from its raw files, where its cells are lost."""

import shutil

import pytest
import yaml

from docs.pages import tables
from docs.pages.cells import main
from lightning_tasks.compare.command import Comparison
from lightning_tasks.compare.record import changed_endpoints, read_record
from lightning_tasks.compare.selection import read_select
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.recipes.variants import full_name, read_variants
from tests.lightning_tasks.compare.test_record import finish

SEEDS = [0, 1]


def compared(recipe, output):
    """The comparison as the command plans it."""
    variants = read_variants(str(recipe))
    how = full_name(str(recipe)), ["val/top1"], {}, Endpoints("", {}), read_select([str(recipe)], SEEDS), False
    return Comparison(variants, SEEDS, output, (), *how, {variant.name for variant in variants})


@pytest.fixture
def recipe(tmp_path):
    base = tmp_path / "demo.yaml"
    base.write_text(yaml.safe_dump({"model": {"class_path": "tests.lightning_tasks.demo.DemoModule"}}))
    path = tmp_path / "searched.yaml"
    content = {"base": str(base), "variants": {"plain": None, "biased": {"model.init_bias": True}}}
    content |= {"grid": {"model.rate": [0.1, 0.5]}, "select": {"metric": "val/top1", "mode": "max", "seeds": [7]}}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def chosen(recipe, output, finished=0):
    """The comparison with all cells of its selection, and as many others."""
    comparison = compared(recipe, output)
    for value, cell in enumerate(comparison.selection):
        finish(cell, float(value))
    for cell in comparison.cells[:finished]:
        finish(cell, 0.5)
    output.mkdir(exist_ok=True)
    comparison.write_record()
    return comparison


def test_a_comparison_goes_on_from_what_was_chosen_alone(recipe, tmp_path):
    first = chosen(recipe, tmp_path / "first")
    main([str(recipe), str(first.output), str(tmp_path / "again")])
    again = compared(recipe, tmp_path / "again")
    assert again.choices == first.choices
    assert all(cell.is_finished() for cell in again.selection)
    assert not any(cell.is_finished() for cell in again.cells)
    first.write_tables()
    recipe.write_text(recipe.read_text() + "settings: {model.noise: 0.3}\n")
    with pytest.raises(SystemExit, match="has other settings for plain seed 0 than"):
        main([str(recipe), str(first.output), str(tmp_path / "third")])


def test_a_comparison_goes_on_from_its_raw_files(recipe, tmp_path):
    first = chosen(recipe, tmp_path / "first", finished=3)
    first.write_tables()
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("results.csv", "comparison.json"):
        shutil.copy(first.output / name, raw)
    tables.pack(raw / "results.csv")

    main([str(recipe), str(raw), str(tmp_path / "again")])
    again = compared(recipe, tmp_path / "again")
    assert again.choices == first.choices
    assert changed_endpoints(read_record(again.output), again.endpoints, True) == [], "they were named before"
    assert [cell.is_finished() for cell in again.cells] == [True, True, True, False]
    for cell, other in zip(again.cells[:3], first.cells[:3], strict=True):
        for key in ("rows", "initial_weights", "training_data", "seconds", "fingerprint"):
            assert cell.result()[key] == other.result()[key]

    with pytest.raises(SystemExit, match="exists; give another folder"):
        main([str(recipe), str(raw), str(tmp_path / "again")])
    recipe.write_text(recipe.read_text().replace("init_bias: true", "init_bias: false"))
    with pytest.raises(SystemExit, match="has other settings for biased seed 0 than"):
        main([str(recipe), str(raw), str(tmp_path / "third")])
    (raw / "comparison.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"comparison\.json is damaged"):
        main([str(recipe), str(raw), str(tmp_path / "third")])
    assert not (tmp_path / "third").exists()
