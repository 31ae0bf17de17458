"""What a comparison file and the arguments of the command stand for."""

import math

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare.plan import parse_seeds, plan_cells, summary_endpoints, summary_references
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.schema import override_arguments
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.rows import each_row


@pytest.mark.parametrize(("text", "seeds"), [("0:3", [0, 1, 2]), ("4,2", [4, 2]), ("7", [7])])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@each_row("text", ["3:3", "a", "1,1", "0:2:4", ""])
def test_seeds_that_make_no_sense(text):
    with pytest.raises(UsageError, match="--seeds"):
        parse_seeds(text)


def test_overrides_are_spelled_as_on_the_command_line():
    assert override_arguments({"model.mechanism": "rpc", "trainer.callbacks+": {"a": 1}, "model.rate": 0.1}) == (
        "--model.mechanism=rpc",
        '--trainer.callbacks+={"a": 1}',
        "--model.rate=0.1",
    )


def test_only_numbers_are_infinite():
    spelled = override_arguments({"model.options": {"lam": [math.inf, -math.inf], "Infinity": 'says "Infinity", NaN'}})
    assert spelled == (r'--model.options={"lam": [.inf, -.inf], "Infinity": "says \"Infinity\", NaN"}',)
    read = yaml.safe_load(spelled[0].partition("=")[2])
    assert read == {"lam": [math.inf, -math.inf], "Infinity": 'says "Infinity", NaN'}


def test_a_recipe_stands_for_itself(demo):
    assert read_variants(str(demo)) == [Variant("demo", str(demo))]


def test_a_comparison_stands_for_its_variants(comparison, demo, tmp_path):
    slow, fast, _ = read_variants(str(comparison))
    assert slow == Variant("slow", str(demo))
    assert fast.overrides == ("--model.rate=0.5",)
    assert not fast.test
    comparison.write_text(comparison.read_text() + "test: true\nsettings: {model.width: 16}\n")
    assert read_variants(str(comparison))[1].overrides == ("--model.width=16", "--model.rate=0.5")
    assert all(cell.test for cell in plan_cells(read_variants(str(comparison)), [0], tmp_path))


@each_row(
    "content",
    [
        "variants: {a: {}}",
        "base: demo\nvariants: [a]",
        "base: demo\nvariants: {}",
        "base: demo\nvariants: {a: {}}\ntest: 1",
        "base: demo\nvariants: {a: {}}\nmore: 1",
        "base: demo\nvariants: {a: [1]}",
        "base: demo\nvariants: {a: {}}\nmetrics:",
        "base: demo\nvariants: {a: {}}\nprimary: val/loss",
        "base: demo\nvariants: {a: {}}\nmetrics: [val/loss]\nprimary: [val/loss]",
        "base: demo\nvariants: {a: {}}\nmetrics: [val/loss]\nmargins: {val/top1: 0.1}",
        "base: demo\nvariants: {a: {}}\nmetrics: [val/loss]\nmargins: {val/loss: 0.0}",
        "base: demo\nvariants: {a: {}}\nmetrics: [val/loss]\nmargins: {val/loss: .nan}",
        "base: demo\nvariants: {a: {}}\nmetrics: [val/loss]\nmargins: {val/loss: true}",
        "base: demo\nvariants: {a: {}, b: {}}\nreferences: [a, b]",
        "base: demo\nvariants: {a: {}, b: {}}\nreferences: {b: a}",
        "[1]",
    ],
)
def test_a_comparison_of_another_shape(tmp_path, content):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"wrong\.yaml"):
        read_variants(str(path))


@pytest.mark.parametrize(
    ("references", "text"),
    [
        ({"fast": ["slow"]}, "'fast', which is none of the variants; the nearest are fast 1e-1"),
        ({"watched": ["slwo"]}, "'slwo', which is none of the variants; the nearest are slow"),
        ({"watched": ["zzzz"]}, "'zzzz', which is none of the variants; they are slow, fast 1e-1, watched"),
        ({"slow": ["slow"]}, "must be other variants, each once"),
        ({"slow": ["watched", "watched"]}, "must be other variants, each once"),
    ],
)
def test_references_that_are_no_variants_are_refused_before_anything_runs(comparison, tmp_path, references, text):
    comparison.write_text(comparison.read_text() + yaml.safe_dump({"references": references}))
    with pytest.raises(SystemExit):
        main(["compare", str(comparison), "--seeds", "0", "--output", str(tmp_path / "out")])
    with pytest.raises(UsageError, match=text):
        read_variants(str(comparison))
    assert not (tmp_path / "out").exists()


def test_endpoints_make_no_other_cells_and_two_files_must_agree(comparison, tmp_path):
    before = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    other = tmp_path / "other.yaml"
    plain = comparison.read_text()
    for path, primary in ((comparison, "val/loss"), (other, "val/top1")):
        said = {"metrics": ["val/loss", "val/top1"], "primary": primary, "margins": {"val/loss": 0.1}}
        path.write_text(yaml.safe_dump({**yaml.safe_load(plain), **said}, sort_keys=False))
    after = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    assert [cell.fingerprint for cell in after] == [cell.fingerprint for cell in before]
    assert summary_endpoints([str(comparison)]) == Endpoints("val/loss", {"val/loss": 0.1})
    with pytest.raises(UsageError, match="have different `primary` or `margins`"):
        summary_endpoints([str(comparison), str(other)])


def test_references_make_no_other_cells_and_may_be_numbers(comparison, tmp_path):
    content = yaml.safe_load(comparison.read_text())
    content["variants"][0.5] = None
    comparison.write_text(yaml.safe_dump(content))
    before = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    comparison.write_text(yaml.safe_dump({**content, "references": {0.5: ["watched"]}}))
    after = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    assert [cell.fingerprint for cell in after] == [cell.fingerprint for cell in before]
    assert summary_references([str(comparison)]) == {"0.5": ["watched"]}


def test_two_configurations_of_one_folder(demo, tmp_path):
    with pytest.raises(UsageError, match="with _ for other signs, got a b, a_b"):
        plan_cells([Variant("a b", str(demo)), Variant("a_b", str(demo))], [0], tmp_path)


def test_two_configurations_of_one_name(demo, tmp_path):
    with pytest.raises(UsageError, match="different names"):
        plan_cells([Variant("a", str(demo)), Variant("a", str(demo))], [0], tmp_path)
