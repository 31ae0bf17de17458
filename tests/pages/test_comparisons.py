"""Comparisons that are copied beside their page fill it."""

import json
import shutil
from dataclasses import replace

import pytest

from docs.pages import __main__ as command
from docs.pages.errors import PageError
from docs.pages.list_of_pages import RESULTS
from docs.pages.numbers import number
from docs.pages.raw import Comparison, asked_of
from docs.pages.results import zoo
from docs.pages.results.locater import mean
from docs.pages.results.rpc import language_modeling_rates
from docs.pages.tables import tried_values
from lightning_tasks.compare.choice import NOTHING, Choice, Tried
from lightning_tasks.compare.record import FINISHED, CellRecord, Record, VariantRecord, write_record
from lightning_tasks.compare.statistics import paired_p
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.runs.environment import Environment
from tests.pages.toy import RECIPE, ROOT, write_results


def test_a_comparison_that_is_copied_beside_its_page_fills_it(tmp_path):
    folder = tmp_path / "docs" / "results" / "zoo" / "images"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "results" / "zoo.md", folder.parents[1])
    write_results(folder / "results.csv")
    rates = [Tried([f"--lr={rate}"], score) for rate, score in (("1e-3", 0.4), ("2e-3", 0.5))]
    cells = [
        CellRecord(config, seed, state=FINISHED, initial_weights=f"{config} {seed}" if seed == 3 else "")
        for seed in range(4)
        for config in ("softmax", "rpc")
    ]
    record = Record(
        [VariantRecord("softmax"), VariantRecord("rpc")],
        {},
        ["test/top1", "val/loss"],
        cells=cells,
        choices=[Choice("rpc", "val/top1", "max", [100], rates, 1)],
        primary="test/top1",
    )
    write_record(record, folder)
    command.build(tmp_path, [zoo.PAGE])
    assert command.check(tmp_path, [zoo.PAGE]) == []
    text = (tmp_path / zoo.PAGE.file).read_text()
    assert "| rpc | 4 | 53.5 ± 1.3 | softmax | +2.0 [+2.0, +2.0] | < 0.001 | 0.0 | higher |" in text
    assert "| rpc | 40.0 | **50.0** |" in text
    assert text.count("no numbers yet |") == 5  # the tables of the text, and of further seeds
    assert "<!-- number text-worse -->no numbers yet<!-- end -->" in text
    more = folder.with_name("images_more")
    more.mkdir()
    write_results(more / "results.csv", start=4)
    write_record(replace(record, cells=[replace(cell, seed=cell.seed + 4) for cell in cells]), more)
    command.build(tmp_path, [zoo.PAGE])
    assert command.check(tmp_path, [zoo.PAGE]) == []
    text = (tmp_path / zoo.PAGE.file).read_text()
    both = "| rpc | 55.5 ± 2.5 | softmax | +2.1 [+2.0, +2.1] | +2.0 [+2.0, +2.1] | < 0.001 | higher |"
    assert both in text
    shutil.rmtree(more)
    command.build(tmp_path, [zoo.PAGE])
    written = (folder / "summary.md").read_text()
    assert "- rpc: lr=2e-3, by val/top1 (max) of seed 100: lr=1e-3 0.4, lr=2e-3 0.5" in written
    assert "- rpc seed 3: initial weights differ from those of softmax" in written
    assert (folder / "differences.png").is_file()
    earlier = json.loads((folder / "comparison.json").read_text())
    del earlier["primary"], earlier["margins"]
    (folder / "comparison.json").write_text(json.dumps(earlier))
    assert command.check(tmp_path, [zoo.PAGE]) == [], "the recipe names the primary endpoint"
    results = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(results.replace("softmax", "other"))
    (found,) = command.check(tmp_path, [zoo.PAGE])
    assert "has no values of softmax, which all others are compared with" in found
    (folder / "results.csv").write_text(results)
    (folder / "comparison.json").write_text('{"metrics": []}')
    (found,) = command.check(tmp_path, [zoo.PAGE])
    assert "images/comparison.json is damaged (KeyError: 'variants')" in found


def test_what_a_recipe_asks_for_is_corrected_for_before_it_has_run(toy):
    root, page = toy
    raw = page.raw(root)
    assert raw.comparison("", "compare.yaml").row("test/top1", "rpc", "softmax").family == 1
    (root / "compare.yaml").write_text(
        RECIPE.replace("{}", "{softmax: {}, rpc: {}, third: {}, fourth: {}}") + "references: {third: [rpc]}\n"
    )
    row = page.raw(root).comparison("", "compare.yaml").row("test/top1", "rpc", "softmax")
    assert (row.family, row.corrected) == (4, pytest.approx(4 * row.p))
    record = Record(
        [VariantRecord("softmax"), VariantRecord("rpc")],
        {},
        ["test/top1"],
        primary="test/top1",
        environments=[Environment("0" * 40), Environment("1" * 40)],
        comparisons=7,
    )
    write_record(record, raw.folder)
    found = page.raw(root).comparison("", "compare.yaml")
    assert found.row("test/top1", "rpc", "softmax").family == 7
    (said,) = found.remarks["Environments"]
    assert said.endswith("different commits: 0000000000; 1111111111")
    chose = CellRecord("rpc lr=1", 7, state=FINISHED, environment=1)
    cells = [CellRecord(name, seed, state=FINISHED, environment=0) for name in ("softmax", "rpc") for seed in range(4)]
    write_record(replace(record, cells=cells, selection=[chose]), raw.folder)
    assert page.raw(root).comparison("", "compare.yaml").remarks["Environments"] == [], "the table is of one commit"


def test_further_seeds_are_corrected_for_all_among_which_the_first_seeds_chose(tmp_path):
    raw = zoo.PAGE.raw(tmp_path)
    shifts = {"softmax": 0.0, "rpc": 0.02, "sink": 0.0, "kde": 0.0}
    for place, configs, seeds in (("images", [*shifts], range(4)), ("images_more", ["softmax", "rpc"], range(4, 8))):
        (raw.folder / place).mkdir(parents=True)
        lines = [
            f"{config},{seed},10,test/top1,{0.5 + shifts[config] + 0.01 * (-1) ** seed * (config != 'softmax')}"
            for config in configs
            for seed in seeds
        ]
        text = "\n".join(["config,seed,step,metric,value", *lines])
        (raw.folder / place / "results.csv").write_text(f"{text}\n")
        write_record(Record([*map(VariantRecord, configs)], {}, ["test/top1"], primary="test/top1"), raw.folder / place)
    (row,) = zoo.more_seeds("images", raw).rows
    p = paired_p([0.03, 0.01] * 4)
    assert row[0] == "rpc"
    assert row[-2] == number(3 * p, 3)
    assert number(3 * p, 3) != number(p, 3)


@pytest.mark.parametrize(
    ("page", "variant", "text"),
    [
        (mean, "qk weight decay", r"the decay that was chosen is .*, and the page speaks of QKWeightDecay"),
        (
            language_modeling_rates,
            "rpc",
            r"lr=0\.0005 was chosen for rpc, and the page says that lr=0\.002 was for all",
        ),
    ],
)
def test_a_page_that_speaks_of_what_was_chosen_refuses_another_choice(page, variant, text, tmp_path):
    folder = page.PAGE.raw(tmp_path).folder
    shutil.copytree(page.PAGE.raw(ROOT).folder, folder)
    page.read(page.PAGE.raw(tmp_path))
    path = folder / "comparison.json"
    record = json.loads(path.read_text())
    (choice,) = (each for each in record["choices"] if each["variant"] == variant)
    choice["chosen"] = 0
    path.write_text(json.dumps(record))
    with pytest.raises(PageError, match=text):
        page.read(page.PAGE.raw(tmp_path))
    choice["chosen"] = NOTHING
    path.write_text(json.dumps(record))
    with pytest.raises(PageError, match=f"comparison.json has nothing that was chosen for {variant}"):
        page.read(page.PAGE.raw(tmp_path))
    choice["chosen"] = 9
    path.write_text(json.dumps(record))
    with pytest.raises(PageError, match=r"comparison\.json is damaged .*chosen is 9"):
        page.read(page.PAGE.raw(tmp_path))
    record["environments"][0]["hardware"] = 5
    choice["chosen"] = 0
    path.write_text(json.dumps(record))
    with pytest.raises(PageError, match=r"comparison\.json is damaged .*str is needed"):
        page.read(page.PAGE.raw(tmp_path))
    path.write_text("[" * 100_000)
    with pytest.raises(PageError, match=r"comparison\.json is damaged .*RecursionError"):
        page.read(page.PAGE.raw(tmp_path))


def test_values_that_were_not_tried_for_all_are_no_columns():
    rates = [Tried([f"--lr={rate}"], 0.5) for rate in (1, 2)]
    first = Choice("a", "val/top1", "max", [7], rates, 0)
    assert str(tried_values([first], "of")).splitlines()[0] == "| of | 1 | 2 |"
    for other in (rates[:1], [Tried(["--lr=1", "--b=2"], 0.5), rates[1]]):
        with pytest.raises(PageError, match=r"b was tried with .*; a table has one setting, with the same values"):
            tried_values([first, replace(first, variant="b", tried=other)], "of")


def test_the_rate_beyond_the_grid_is_one_more_than_was_tried(tmp_path):
    page = language_modeling_rates
    folder = page.PAGE.raw(tmp_path).folder
    shutil.copytree(page.PAGE.raw(ROOT).folder, folder)
    assert [len(choice.tried) for choice in page.with_larger(page.PAGE.raw(tmp_path))] == [4] * 5
    shutil.copy(folder / "comparison.json", folder / "edge")
    with pytest.raises(PageError, match=r"edge/comparison\.json does not have .* for softmax and one rate more"):
        page.with_larger(page.PAGE.raw(tmp_path))
    for text in ("[]", "{", '{"choices": [{}]}', "[" * 100_000):
        (folder / "edge" / "comparison.json").write_text(text)
        with pytest.raises(PageError, match=r"edge/comparison\.json is damaged"):
            page.with_larger(page.PAGE.raw(tmp_path))
    (folder / "edge" / "comparison.json").unlink()
    with pytest.raises(PageError, match=r"edge/comparison\.json is missing"):
        page.with_larger(page.PAGE.raw(tmp_path))


@pytest.mark.parametrize("seconds", ["60", None, float("nan")])
def test_what_cells_took_is_of_finished_ones_and_a_number(seconds):
    kept = {"variant": "softmax", "seed": 0, "state": FINISHED, "seconds": 60.0}
    waiting = {**kept, "seed": 1, "state": "waiting", "seconds": None}
    found = Comparison([], [], {}, Endpoints(), ["softmax"], cells=[kept, waiting])
    assert found.seconds() == found.seconds("softmax") == [60.0]
    with pytest.raises(PageError, match=f"has {seconds!r} as the seconds of softmax 0"):
        replace(found, cells=[{**kept, "seconds": seconds}]).seconds()
    with pytest.raises(PageError, match="no finished cell of rpc"):
        found.seconds("rpc")


def test_where_runs_ran_is_said_of_all_of_them():
    environments = [
        Environment("0123456789abcdef", False, "AMD EPYC, 2 cores"),
        Environment("fedcba9876543210", True, "AMD EPYC, 2 cores"),
        Environment("0123456789abcdef", False, "Intel Xeon, 4 cores"),
        Environment(versions={"attnswap": "0.2.0"}),
    ]

    def ran(*places, **waiting):
        names = ["softmax", "rpc", "l2", "kde"]
        cells = [
            {"variant": name, "seed": 0, "state": waiting.get(name, FINISHED), "environment": place}
            for name, place in zip(names, places, strict=False)
        ]
        return Comparison([], [], {}, Endpoints(), names, cells=cells, environments=environments)

    here = "commit 0123456789, AMD EPYC, 2 cores"
    both = "commit 0123456789 and commit fedcba9876 with changes, AMD EPYC, 2 cores"
    assert ran(0, 0).ran_in() == ran(0, 1, rpc="waiting").ran_in() == ran(0, 1).ran_in("softmax") == here
    assert ran(0, 1, 0).ran_in() == both
    assert ran(0, 1, 2).ran_in() == f"{both}; commit 0123456789, Intel Xeon, 4 cores"
    assert ran(3).ran_in() == "version 0.2.0"
    for place in (-1, 4, None):
        with pytest.raises(PageError, match="has no environment of rpc 0"):
            ran(0, place).ran_in()
    with pytest.raises(PageError, match="no finished cell of kde"):
        ran(0).ran_in("kde")


@pytest.mark.parametrize(
    ("page", "place", "recipe"),
    [(page, place, recipe) for page in RESULTS for place, recipe in page.summaries.items()],
    ids=lambda given: getattr(given, "name", given),
)
def test_a_comparison_has_the_endpoints_that_its_recipe_names(page, place, recipe):
    """The recipe's history is what shows that they were named before."""
    asked = json.loads((page.raw(ROOT).folder / place / "comparison.json").read_text())
    named = asked_of(str(ROOT / recipe) if (ROOT / recipe).is_file() else recipe)
    assert (asked["primary"], asked["margins"]) == (named.primary, dict(named.margins))
    assert not asked.get("changed")
