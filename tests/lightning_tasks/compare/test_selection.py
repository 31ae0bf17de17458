"""`grid` and `select`: values that a comparison chooses on seeds that its table does not use."""

import json
import math
import re
import time
from collections import Counter

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare.choice import NOTHING, Choice, Tried
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.record import read_record
from lightning_tasks.compare.selection import Select, candidates, choose, chosen, plan_selection, read_select
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import Variant, read_variants
from tests.lightning_tasks.compare.test_record import finish
from tests.lightning_tasks.programs import start_forked
from tests.rows import each_row

SELECT = {"metric": "val/loss", "mode": "min", "seeds": [7]}
RATES = [0.1, 0.5]


@pytest.fixture
def searched(demo, tmp_path):
    """A comparison file of two variants with a grid of rates, whose content a test may change."""

    def write(**change):
        content = {
            "base": str(demo),
            "metrics": ["val/loss"],
            "variants": {"plain": None, "biased": {"model.init_bias": True}},
            "grid": {"model.rate": RATES},
            "select": SELECT,
            **change,
        }
        path = tmp_path / "searched.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


# -- what a file asks for ----------------------------------------------------------------------------------------------


def test_a_grid_is_of_all_variants_or_of_some(searched):
    plain, biased = read_variants(str(searched()))
    assert plain.grid == biased.grid == (("--model.rate=0.1",), ("--model.rate=0.5",))
    assert [each.name for each in candidates(biased)] == ["biased rate=0.1", "biased rate=0.5"]
    assert candidates(biased)[0].overrides == ("--model.init_bias=true", "--model.rate=0.1")
    some = {"model.rate": {"biased": RATES}, "model.optimizer": {"biased": ["SGD", "Adam"]}}
    plain, biased = read_variants(str(searched(grid=some)))
    assert plain.grid == ()
    assert [each.name for each in candidates(biased)] == [
        f"biased rate={rate} optimizer={name}" for rate in RATES for name in ("SGD", "Adam")
    ]


def test_one_variant_by_itself_has_the_value_of_its_base(searched):
    """Given alone, `select` is not read, so that no choice is waited for."""
    (alone,) = read_variants(f"{searched()}/biased")
    assert (alone.overrides, alone.grid) == (("--model.init_bias=true",), ())


@each_row(
    ("change", "says"),
    [
        ({"grid": {}}, "`grid` must be"),
        ({"grid": [1]}, "`grid` must be"),
        ({"grid": {"model.rate": 0.1}}, "two or more values, none twice"),
        ({"grid": {"model.rate": {}}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [0.1]}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [0.1, 0.1]}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [0.001, "1e-3"]}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [1, "1.0", 2]}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [math.inf, ".inf"]}}, "two or more values, none twice"),
        ({"grid": {"model.rate": [{"a": 1, "b": 2}, {"b": 2.0, "a": "1"}]}}, "two or more values, none twice"),
        (
            {"grid": {"model.init_args.init_bias": [True, False]}},
            "set elsewhere too, as model.init_bias; leave one out",
        ),
        ({"grid": {"model": [{"rate": 1}, {"rate": 2}]}}, "set elsewhere too, as model.init_bias; leave one out"),
        (
            {"grid": {"model.init_args.rate": RATES, "model.rate": RATES}},
            "has model.init_args.rate and model.rate, one of which would take the place of the other",
        ),
        (
            {"grid": {"model.optimizer.lr": RATES, "model.optimizer": ["SGD", "Adam"]}},
            "has model.optimizer.lr and model.optimizer, one of which would take the place of the other",
        ),
        ({"grid": {"seed_everything": [1, 2]}}, "`attnswap compare` sets seed_everything of each cell; leave it out"),
        ({"grid": {"trainer.logger": [True, False]}}, "sets trainer.logger of each cell"),
        ({"grid": {"trainer.enable_checkpointing": [True, False]}}, "sets trainer.enable_checkpointing of each cell"),
        ({"settings": {"seed_everything": 3}}, "`settings` has seed_everything, and `attnswap compare` sets"),
        ({"variants": {"plain": {"trainer.default_root_dir": "x"}}}, "'plain' has trainer.default_root_dir, and"),
        (
            {"grid": {"model.rate": {"baised": RATES}}},
            "'baised', which is none of the variants; the nearest are",
        ),
        ({"grid": {"model.init_bias": [True, False]}}, "model.init_bias of 'biased' is in `grid` and set elsewhere"),
        ({"settings": {"model.rate": 1.0}}, "model.rate of 'plain' is in `grid` and set elsewhere too"),
        ({"select": None}, "`select` must be"),
        ({"select": {**SELECT, "mode": "best"}}, "`select` must be"),
        ({"select": {**SELECT, "seeds": []}}, "`select` must be"),
        ({"select": {**SELECT, "seeds": [True]}}, "`select` must be"),
        ({"select": {**SELECT, "seeds": [7, 7]}}, "`select` must be"),
        ({"select": {**SELECT, "more": 1}}, "`select` must be"),
        *(
            ({"select": {**SELECT, "metric": metric}}, f"`select` by {metric!r} might choose on the test data")
            for metric in (
                "test/loss",
                "test_loss",
                "test",
                " test/loss",
                " val/loss",
                "robustness/clean",
                "val/",
                "loss",
            )
        ),
        ({"select": {**SELECT, "seeds": [9, 1]}}, "--seeds has 1, by which `select` in"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused_before_anything_runs(searched, tmp_path, capsys, change, says):
    with pytest.raises(SystemExit):
        main(["compare", str(searched(**change)), "--seeds", "0:2", "--output", str(tmp_path / "out")])
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["seed_everything", "trainer.default_root_dir"])
def test_no_override_of_all_cells_sets_what_each_has_of_its_own(searched, tmp_path, capsys, key):
    with pytest.raises(SystemExit):
        main(["compare", str(searched()), "--seeds", "0", "--output", str(tmp_path / "out"), "--set", f"{key}=1"])
    assert f"--set {key}: `attnswap compare` sets {key} of each cell" in capsys.readouterr().err


def test_values_that_only_look_alike_and_settings_above_a_grid_are_taken(searched):
    values = [1, True, "one", None, "1 e-3", [1], {"a": 1}]
    assert len(read_variants(str(searched(grid={"model.rate": values})))[0].grid) == 7
    options = {"model.optimizer": {"class_path": "SGD"}, "trainer.callbacks": []}
    grid = {"model.optimizer.init_args.lr": RATES, "model.optimizer.init_args.lr_decay": RATES}
    assert len(read_variants(str(searched(grid=grid, variants={"plain": options})))[0].grid) == 4


@pytest.mark.parametrize("left_out", ["grid", "select"])
def test_a_grid_and_how_to_choose_go_together(searched, left_out):
    path = searched()
    path.write_text(
        yaml.safe_dump({key: each for key, each in yaml.safe_load(path.read_text()).items() if key != left_out})
    )
    with pytest.raises(UsageError, match="give both or neither"):
        read_variants(str(path))


def test_an_override_of_all_cells_does_not_take_the_place_of_the_grid(searched, tmp_path):
    variants = read_variants(str(searched()))
    for key in ("model.rate", "model.init_args.rate", "model", "model.rate.part"):
        with pytest.raises(UsageError, match=rf"--set {re.escape(key)} would take the place of every value in `grid`"):
            plan_selection(variants, Select(**SELECT), tmp_path, [f"--{key}=1"], "")
    assert plan_selection(variants, Select(**SELECT), tmp_path, ["--model.rates=1"], "")


def test_two_files_that_choose_differently_are_no_comparison(searched, tmp_path, demo):
    other = tmp_path / "other.yaml"
    other.write_text(searched(select={**SELECT, "mode": "max"}).read_text())
    with pytest.raises(UsageError, match="have different `select`"):
        read_select([str(searched()), str(other)], [0])
    assert read_select([str(demo)], [7]) is None


# -- what results say --------------------------------------------------------------------------------------------------


def scored(demo, tmp_path, scores, mode, **result):
    """The choice among runs that end with these scores, two seeds each."""
    variants = [Variant("v", str(demo), grid=tuple((f"--model.rate={rate}",) for rate in range(len(scores))))]
    select = Select("val/top1", mode, (7, 8))
    cells = plan_selection(variants, select, tmp_path, (), "")
    for cell, score in zip(
        sorted(cells, key=lambda cell: cell.name), [each for each in scores for _ in (7, 8)], strict=True
    ):
        rows = [{"step": 5, "metric": "val/top1", "value": score}, {"step": 5, "metric": "val/loss", "value": score}]
        finish(cell, score, **{"rows": rows, **result})
    return variants, choose(variants, cells, select)


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", [0.1, 0.3, 0.2], 1),
        ("min", [0.3, 0.1, 0.2], 1),
        ("max", [0.3, 0.3], 0),
        ("max", [math.nan, -5.0], 1),
        ("min", [math.nan, 5.0], 1),
        ("min", [-math.inf, 5.0], 1),
    ],
)
def test_the_first_of_the_best_is_chosen_and_nan_is_worst(demo, tmp_path, mode, scores, best):
    variants, (choice,) = scored(demo, tmp_path, scores, mode)
    assert choice.chosen == best
    assert chosen(variants, [choice]) == [Variant("v", str(demo), (f"--model.rate={best}",))]
    said = str(choice)
    assert said.startswith(f"v: rate={best}, by val/top1 ({mode}) of seeds 7, 8: rate=0 ")
    assert said.count("(diverged)") == sum(not math.isfinite(score) for score in scores)


def test_nothing_is_chosen_where_all_runs_diverged(demo, tmp_path):
    variants, (choice,) = scored(demo, tmp_path, [math.nan, math.inf], "max")
    assert choice.chosen == NOTHING
    assert str(choice).startswith("v: nothing, as all diverged, by val/top1 (max) of seeds 7, 8: rate=0 nan (diverged)")
    (waiting,) = chosen(variants, [choice])
    assert waiting.overrides == ("one of rate=0", "one of rate=1")


@each_row(
    ("value", "said"),
    [
        ('{"class_path": "a.b.Decay", "init_args": {"weight": 0.5, "mode": "all"}}', "Decay(weight=0.5, mode='all')"),
        ('{"class_path": "a.b.Decay"}', "Decay()"),
        ('{"class_path": "a.b.Decay", "init_args": null}', 'callbacks+={"class_path": "a.b.Decay", "init_args": null}'),
        ('{"class_path": "a.b.Decay", "more": 1}', 'callbacks+={"class_path": "a.b.Decay", "more": 1}'),
        ('{"class_path": "a.b.\\n\\n# c"}', 'callbacks+={"class_path": "a.b.\\n\\n# c"}'),
        (
            '{"class_path": "a.B", "init_args": {"\\ud800": 1}}',
            'callbacks+={"class_path": "a.B", "init_args": {"\\ud800": 1}}',
        ),
        ("[" * 100_000, "callbacks+=" + "[" * 100_000),
        ("[0.5]", "callbacks+=[0.5]"),
        ("0.5", "callbacks+=0.5"),
        ("a.b.Decay", "callbacks+=a.b.Decay"),
    ],
)
def test_a_class_is_said_as_its_call(value, said):
    tried = [Tried([f"--trainer.callbacks+={value}", "--model.rate=1"], 0.5)]
    assert str(Choice("v", "val/top1", "max", [7], tried, 0)) == (
        f"v: {said} rate=1, by val/top1 (max) of seed 7: {said} rate=1 0.5"
    )


def test_one_run_of_several_that_diverged_makes_its_value_worst(demo, tmp_path):
    variants = [Variant("v", str(demo), grid=(("--model.rate=0",), ("--model.rate=1",)))]
    select = Select("val/top1", "max", (7, 8))
    cells = plan_selection(variants, select, tmp_path, (), "")
    for cell in cells:
        broken = cell.name == "v rate=0" and cell.seed == 8
        rows = [{"step": 5, "metric": "val/top1", "value": 0.9 if cell.name == "v rate=0" else 0.1}]
        finish(cell, 0, rows=[*rows, {"step": 5, "metric": "val/loss", "value": math.inf if broken else 1.0}])
    (choice,) = choose(variants, cells, select)
    assert choice.chosen == 1
    assert choice.tried[0].diverged == "seed 8: val/loss is inf at step 5"


def test_a_metric_that_was_not_logged_is_named(demo, tmp_path):
    rows = [{"step": 5, "metric": "val/top5", "value": 0.0}]
    with pytest.raises(UsageError, match="v rate=0 never logged val/top1; Did you mean 'val/top5'"):
        scored(demo, tmp_path, [0.1, 0.2], "max", rows=rows)


def test_without_all_runs_nothing_is_chosen_and_no_result_is_taken_for_the_variant(demo, tmp_path):
    variants = [Variant("v", str(demo), grid=(("--model.rate=0",), ("--model.rate=1",)))]
    select = Select("val/loss", "min", (7,))
    cells = plan_selection(variants, select, tmp_path, (), "")
    finish(cells[0], 1.0)
    assert choose(variants, cells, select) == []
    finish(plan_cells([Variant("v", str(demo))], [0], tmp_path)[0], 1.0)  # of the time before there was a grid
    (waiting,) = plan_cells(chosen(variants, []), [0], tmp_path)
    assert not waiting.is_finished()
    assert waiting.overrides == ("one of rate=0", "one of rate=1")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_chooses_first_and_says_what(searched, tmp_path, capsys):
    """A rate for each variant; one that diverges, and one for which every value of a variant fails."""
    out = tmp_path / "out"
    grid = {"model.rate": {"plain": [math.nan, 0.1, 0.5], "biased": RATES, "broken": [-1.0, -2.0]}}
    variants = {"plain": None, "biased": {"model.init_bias": True}, "broken": None, "fixed": {"model.rate": 0.2}}
    path = searched(grid=grid, variants=variants, test=True, references={"fixed": ["broken"]})
    command = ["compare", str(path), "--seeds", "0:2", "--output", str(out)]
    with pytest.raises(SystemExit, match="2 of 15 cells failed"):
        main(command)
    said = (out / "summary.md").read_text()
    assert "Chosen:\n\n- plain: rate=" in said
    assert "rate=.nan nan (diverged), rate=0.1 " in said
    assert "- broken seed 0\n- broken seed 1\n" in said
    record = read_record(out)
    assert [choice.variant for choice in record.choices] == ["plain", "biased"]
    for choice in record.choices:
        tried = {}
        for each in choice.tried:
            folder = out / "selection" / f"{choice.variant}_{each.overrides[0].removeprefix('--model.')}" / "seed_7"
            rows = json.loads((folder / "result.json").read_text())["rows"]
            assert not any(row["metric"].startswith("test/") for row in rows)
            tried[each.overrides[0]] = [row["value"] for row in rows if row["metric"] == "val/loss"][-1]
        best = min((value, name) for name, value in tried.items() if math.isfinite(value))[1]
        variant = next(each for each in record.variants if each.name == choice.variant)
        assert variant.overrides[-1] == choice.tried[choice.chosen].overrides[0] == best
    assert Counter(cell.state for cell in record.selection) == {"finished": 5, "failed": 2}
    ran = [cell for cell in record.selection if cell.state == "finished"]
    assert all(cell.seed == 7 and cell.initial_weights and cell.environment == 0 for cell in ran)
    states = {(cell.variant, cell.seed): cell.state for cell in record.cells}
    assert states == {
        (name, seed): "waiting" if name == "broken" else "finished" for name in variants for seed in (0, 1)
    }

    times = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert len(times) == 5 + 6
    path = searched(grid={"model.rate": {key: grid["model.rate"][key] for key in ("plain", "biased")}}, test=True)
    capsys.readouterr()
    main(command)  # without what failed there is nothing left to do
    assert times == {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    page = tmp_path / "report.html"
    main(["report", str(out), "--output", str(page)])
    assert "chosen: plain: rate=" in page.read_text()
    assert "plain rate=" not in page.read_text()  # runs of the selection are none of the table


def test_the_command_names_a_variant_for_which_nothing_can_be_chosen_and_runs_the_others(searched, tmp_path):
    out, grid = tmp_path / "out", {"model.rate": {"plain": [math.nan, math.inf]}}
    command = ["compare", str(searched(grid=grid)), "--seeds", "0", "--output", str(out)]
    said = r"(?s)chose nothing for some variants.*\n  plain: nothing, as all diverged, by val/loss"
    with pytest.raises(SystemExit, match=said):
        main(command)
    assert "- plain: nothing, as all diverged" in (out / "summary.md").read_text()
    record = read_record(out)
    assert [choice.chosen for choice in record.choices] == [NOTHING]
    assert {cell.variant: cell.state for cell in record.cells} == {"plain": "waiting", "biased": "finished"}


@pytest.mark.slow
def test_values_are_chosen_for_the_variants_that_are_asked_for(searched, tmp_path):
    variants = {"plain": None, "biased": {"model.init_bias": True}, "third": None}
    command = ["compare", str(searched(variants=variants)), "--seeds", "0", "--output", str(tmp_path / "out")]
    main([*command, "--variant", "third"])
    assert {each.name for each in (tmp_path / "out" / "selection").iterdir()} == {
        f"{name}_rate={rate}" for name in ("plain", "third") for rate in RATES
    }
    assert [choice.variant for choice in read_record(tmp_path / "out").choices] == ["plain", "third"]
    main(command)
    assert [choice.variant for choice in read_record(tmp_path / "out").choices] == [*variants]


@pytest.mark.slow
def test_a_comparison_that_was_killed_while_it_chose_goes_on(searched, tmp_path):
    hold = {"class_path": "tests.lightning_tasks.demo.Hold", "init_args": {"folder": str(tmp_path)}}
    path, out = searched(variants={"plain": None, "held": {"trainer.callbacks+": hold}}), tmp_path / "out"
    command = ["compare", str(path), "--seeds", "0", "--output", str(out)]
    with start_forked("lightning_tasks", *command) as first:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("held_*")) and time.monotonic() < deadline and first.running:
            time.sleep(0.05)
        first.kill()
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert {file.parent.parent.name for file in kept} == {"plain_rate=0.1", "plain_rate=0.5"}
    record = read_record(out)
    assert (record.choices, {cell.state for cell in record.cells}) == ([], {"waiting"})
    (tmp_path / "release").touch()
    main(command)
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    assert [choice.variant for choice in read_record(out).choices] == ["plain", "held"]
    assert {cell.state for cell in read_record(out).cells} == {"finished"}
