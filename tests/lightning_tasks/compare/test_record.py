"""`comparison.json`: what a comparison was asked to do, what became of its cells, and what a report reads of it."""

import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace

import pytest

from lightning_tasks.__main__ import main
from lightning_tasks.compare.choice import Choice, Tried
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.reading import guessed_record, read_comparison
from lightning_tasks.compare.record import (
    UNKNOWN,
    CellRecord,
    Record,
    VariantRecord,
    changed_endpoints,
    environment_remarks,
    read_record,
    record_of,
    write_record,
)
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.compare.tables import write_tables
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import Variant
from lightning_tasks.runs.environment import Environment, commit_of, mixed_environments
from lightning_tasks.runs.run import is_comparison
from tests.rows import each_row

SEEDS = (0, 1)


def finish(cell, value, **result):
    """Write a result as `run_cell` does."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "config": cell.name,
        "seed": cell.seed,
        "fingerprint": cell.fingerprint,
        "seconds": 1.5,
        "initial_weights": f"weights {cell.seed}",
        "training_data": f"data {cell.seed}",
        "rows": [{"step": 5, "metric": metric, "value": value} for metric in ("val/loss", "val/top1")],
    }
    (cell.folder / "result.json").write_text(json.dumps({**whole, **result}))


@pytest.fixture
def planned(demo, tmp_path):
    """Cells of three variants, not in the order of the alphabet, with two seeds."""
    variants = [Variant(name, str(demo), (f"--model.rate={rate}",)) for name, rate in (("z", 1), ("b", 2), ("a", 3))]
    return plan_cells(variants, SEEDS, tmp_path / "out")


def test_the_record_says_what_was_asked_and_what_became_of_it(planned, tmp_path):
    finish(planned[0], 1.0)
    finish(planned[1], float("nan"))
    said = Endpoints("val/loss", {"val/loss": 0.1})
    tried = [replace(planned[0], name=f"z rate={rate}", seed=7, place="selection") for rate in (1, 2)]
    finish(tried[0], 1.0, environment=RAN_IN)
    record = record_of(planned, ["val/loss"], {"a": ["b"]}, [planned[2]], endpoints=said, selection=tried)
    write_record(record, tmp_path / "out")
    assert read_record(tmp_path / "out") == record
    assert [asdict(variant) for variant in record.variants[:1]] == [
        {"name": "z", "base": "demo", "overrides": ["--model.rate=1"], "test": False}
    ]
    assert (record.configs, record.references, record.metrics) == (["z", "b", "a"], {"a": ["b"]}, ["val/loss"])
    assert record.seeds == [0, 1]
    assert record.endpoints == said
    assert {"attnswap", "python", "torch"} <= record.versions.keys()
    assert [cell.state for cell in record.cells] == ["finished", "finished", "failed", "waiting", "waiting", "waiting"]
    first, diverged = record.cells[:2]
    assert (first.seconds, first.initial_weights, first.training_data) == (1.5, "weights 0", "data 0")
    assert (first.diverged, diverged.diverged) == ("", "val/loss is nan at step 5")
    chose, waits = record.selection
    assert (chose.variant, chose.seed, chose.state, chose.initial_weights) == ("z rate=1", 7, "finished", "weights 7")
    assert record.environments[chose.environment].hardware == RAN_IN["hardware"]
    assert (waits.state, waits.environment) == ("waiting", -1)
    assert not list((tmp_path / "out").glob("*.partial"))


def test_cells_of_other_seeds_stay_where_their_settings_do(planned, demo, tmp_path):
    """More seeds go on with a comparison; other overrides of a variant make its cells others."""
    for cell in planned:
        finish(cell, 1.0)
    shutil.copytree(planned[0].folder, planned[0].folder.with_name("seed_00"))  # by hand: it is no cell
    changed = [replace(cell, overrides=("--model.rate=9",)) if cell.name == "b" else cell for cell in planned]
    more = [replace(cell, seed=7) for cell in changed[:3]]
    cells = record_of(more, [], {}).cells
    assert [(cell.variant, cell.seed, cell.state) for cell in cells] == [
        ("z", 7, "waiting"),
        ("b", 7, "waiting"),
        ("a", 7, "waiting"),
        *((name, seed, "finished") for name in ("z", "a") for seed in SEEDS),
    ]


def test_a_report_takes_order_references_and_metrics_from_the_record(planned, tmp_path):
    out = tmp_path / "out"
    for place, cell in enumerate(planned):
        finish(cell, float(place))
    write_record(record_of(planned, ["val/top1"], {"a": ["b"]}), out)
    (out / "results.csv").write_text("no table")
    (out / "summary.csv").write_text("no table")
    read = read_comparison(out)
    assert [(run.config, run.seed) for run in read.runs] == [(name, seed) for name in "zba" for seed in SEEDS]
    assert [(row.metric, row.config, row.reference) for row in read.summary] == [
        ("val/top1", "z", ""),
        ("val/top1", "b", "z"),
        ("val/top1", "a", "z"),
        ("val/top1", "a", "b"),
    ]
    assert (read.summary[-1].pairs, read.summary[-1].difference) == (2, 1.0)
    assert read.notes == []


def test_a_report_shows_no_cell_of_other_settings(planned, tmp_path):
    """Those of a comparison that was begun anew and stopped."""
    out = tmp_path / "out"
    for cell in planned[:-1]:
        finish(cell, 1.0)
    changed = [replace(cell, overrides=("--model.rate=9",)) if cell.name == "b" else cell for cell in planned]
    write_record(record_of(changed, ["val/loss"], {}), out)
    read = read_comparison(out)
    assert [(run.config, run.seed) for run in read.runs] == [("z", 0), ("z", 1), ("a", 0)]
    (unfinished, others) = read.notes
    assert unfinished == f"{out}: not finished: a/seed_1"
    assert "not shown, as comparison.json has no cells of these settings, code and files (others, or" in others
    assert others.endswith("left out): b seed 0, b seed 1")


def test_a_summary_alone_says_what_diverged(planned, tmp_path):
    for cell in planned:
        finish(cell, math.nan if cell.label == "a seed 1" else 0.5 + cell.seed)
    written = write_tables(planned, ["val/loss"], {"b": ["a"]}, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "cells")
    verdicts = [row.verdict for row in read_comparison(tmp_path / "out").summary]
    assert verdicts == [row.verdict for row in written]
    assert {"diverged", "reference diverged"} <= {*verdicts}


def test_a_table_without_cells_is_reported_with_its_record(planned, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    lines = [f"{cell.name},{cell.seed},5,val/loss,{place}" for place, cell in enumerate(planned)]
    (out / "results.csv").write_text("\n".join(["config,seed,step,metric,value", *lines]) + "\n")
    write_record(record_of(planned, ["val/loss"], {}), out)
    read = read_comparison(out)
    assert len(read.runs) == 6
    assert [row.pairs for row in read.summary] == [0, 2, 2]
    assert read.notes == []


def test_a_folder_with_its_record_alone_is_a_comparison_of_which_nothing_is_finished(planned, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    write_record(record_of(planned, [], {}), out)
    assert is_comparison(out)
    with pytest.raises(SystemExit):
        main(["report", str(out), "--output", str(tmp_path / "page.html")])
    assert "no cell of this comparison is finished; start the same command again" in capsys.readouterr().err


def test_without_a_record_it_is_guessed_from_the_tables(tmp_path):
    (tmp_path / "summary.csv").write_text(
        "metric,config,mean,reference\nval/loss,z,1,\nval/loss,b,1,z\nval/loss,a,1,z\nval/loss,a,1,b\n"
    )
    found = guessed_record(tmp_path, {("z", 0): [], ("b", 0): []}, [("a", 1), ("z", 0)])
    assert (found.configs, found.references, found.metrics) == (["z", "b", "a"], {"a": ["b"]}, ["val/loss"])
    assert [(cell.variant, cell.seed) for cell in found.cells] == [("a", 1), ("z", 0)]


CHOICE = asdict(Choice("a", "val/loss", "min", [7], [Tried(["--lr=1"], 0.5)], 0))
TRIED = CHOICE["tried"][0]
GOOD = asdict(Record([VariantRecord("a")], {}, ["val/loss"], [0], [CellRecord("a", 0)], {"torch": "2"}))


@each_row(
    ("change", "says"),
    [
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ([], "list indices"),
        ({"variants": None}, "None is NoneType, and list is needed"),
        ({"variants": [{**GOOD["variants"][0], "name": 1}]}, "1 is int, and str is needed"),
        ({"variants": [{**GOOD["variants"][0], "test": 1}]}, "1 is int, and bool is needed"),
        ({"variants": GOOD["variants"] * 2}, "a variant is there twice"),
        ({"cells": GOOD["cells"] * 2}, "cells has a cell twice"),
        ({"references": {"a": ["b"]}}, "references has 'b', which is none of the variants"),
        ({"metrics": ["\ud800"]}, "surrogates"),
        ({"seeds": [True]}, "True is bool, and int is needed"),
        (
            {"cells": [{**GOOD["cells"][0], "variant": "../../x"}]},
            r"cells has '\.\./\.\./x', which is none of the variants",
        ),
        ({"cells": [{**GOOD["cells"][0], "seed": 10**4000}]}, r"the seed 10+ is not at least 0 and below 2\*\*32"),
        ({"cells": [{**GOOD["cells"][0], "seconds": 10**400}]}, "too large"),
        ({"cells": [{"variant": "a"}]}, "KeyError"),
        ({"versions": {"torch": [1]}}, r"\[1\] is list"),
        ({"primary": 1}, "1 is int, and str is needed"),
        ({"margins": {"val/loss": -1.0}}, "a margin is -1.0, and must be above 0"),
        ({"choices": [{**CHOICE, "mode": "sideways"}]}, "mode is 'sideways', and min or max is needed"),
        ({"choices": [{**CHOICE, "seeds": []}]}, "the choice of 'a' has no seeds, or tried no settings"),
        ({"choices": [{**CHOICE, "tried": [{**TRIED, "overrides": []}]}]}, "has no seeds, or tried no settings"),
        ({"choices": [{**CHOICE, "tried": [{**TRIED, "score": 10**400}]}]}, "10+ is too large for a float"),
        ({"choices": [{**CHOICE, "tried": [{**TRIED, "score": "x"}]}]}, "'x' is str, and float or int is needed"),
        ({"choices": [{**CHOICE, "tried": [{**TRIED, "diverged": "it"}]}]}, "chosen is 0, which diverged"),
        ({"selection": GOOD["cells"] * 2}, "selection has a cell twice"),
        ({"selection": [{**GOOD["cells"][0], "environment": 3}]}, "a cell ran in environment 3, of 0"),
    ],
)
def test_a_record_that_no_comparison_wrote_is_named_with_the_cure(tmp_path, change, says):
    text = change if isinstance(change, str) else json.dumps({**GOOD, **change} if isinstance(change, dict) else change)
    path = tmp_path / "comparison.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"{path} is damaged \(.*{says}.*\); the same `attnswap compare` writes it"):
        read_comparison(tmp_path)


def test_a_record_of_a_later_version_and_names_that_are_paths_are_read(tmp_path):
    odd = {**GOOD, "variants": [{**GOOD["variants"][0], "name": "../x"}], "cells": [], "later": 1}
    (tmp_path / "comparison.json").write_text(json.dumps(odd))
    assert read_record(tmp_path).configs == ["../x"]


@each_row("kind", ["link", "broken link", "folder", "large"])
def test_a_record_is_a_bounded_file_of_its_folder(tmp_path, kind):
    out, path = tmp_path / "out", tmp_path / "out" / "comparison.json"
    out.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 1 << 34)
    else:
        (tmp_path / "elsewhere").write_text(json.dumps(GOOD))
        path.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    says = {"link": "is a link out of", "folder": "is no file", "large": "17,179,869,184 bytes"}.get(kind, "cannot be")
    with pytest.raises(UsageError, match=re.escape(str(path)) + ".*" + says):
        read_record(out)
    if kind == "link":
        write_record(Record([], {}, []), out)
        assert not path.is_symlink()
        assert json.loads((tmp_path / "elsewhere").read_text()) == GOOD


# -- where cells ran ---------------------------------------------------------------------------------------------------


RAN_IN = {
    "commit": "a" * 40,
    "modified": False,
    "hardware": "a processor, 2 cores",
    "versions": {"torch": "2.0"},
    "changes": "",
}


def test_cells_name_the_code_and_the_machine_that_they_ran_with(planned, tmp_path, capsys):
    finish(planned[0], 1.0)  # an earlier version's
    finish(planned[1], 1.0, environment=RAN_IN)
    finish(planned[2], 1.0, environment=RAN_IN)
    finish(planned[3], 1.0, environment={**RAN_IN, "modified": True})
    finish(planned[4], 1.0, environment={**RAN_IN, "hardware": "another", "versions": {"torch": "2.1", "timm": "1.0"}})
    write_record(record_of(planned, ["val/loss"], {}), tmp_path / "out")
    record = read_record(tmp_path / "out")
    assert [cell.environment for cell in record.cells] == [-1, 0, 0, 1, 2, -1]
    assert [asdict(each) for each in record.environments][:2] == [RAN_IN, {**RAN_IN, "modified": True}]
    said = [
        "the cells ran with the code of different commits: aaaaaaaaaa; aaaaaaaaaa with changes",
        "the cells ran on different hardware: a processor, 2 cores; another",
        "the cells ran with different versions: torch 2.0, no timm; torch 2.1, timm 1.0",
    ]
    assert environment_remarks(planned) == said
    write_tables(planned, ["val/loss"], {}, tmp_path / "out")
    assert "Environments:\n\n- " + "\n- ".join(said) in (tmp_path / "out" / "summary.md").read_text()
    assert environment_remarks(planned[:3]) == []


def test_devices_of_one_kind_and_an_unknown_environment_are_no_difference():
    one = Environment("a", False, "cpu, 16 cores, GPU", {"torch": "2"})
    assert mixed_environments([one, replace(one, hardware="cpu, 16 cores, GPU, GPU"), Environment("a")]) == []
    assert mixed_environments([one, replace(one, versions={"torch": "2", "timm": "1"})]) == [
        "the cells ran with different versions: no timm; timm 1"
    ]


@pytest.mark.parametrize(
    "given", [1, {}, {**RAN_IN, "modified": 1}, {**RAN_IN, "versions": {"torch": 2}}], ids=range(4)
)
def test_a_damaged_environment_of_a_result_is_named(planned, given):
    finish(planned[0], 1.0, environment=given)
    with pytest.raises(UsageError, match=r"result\.json is damaged .*delete it"):
        record_of(planned, ["val/loss"], {})


def test_a_place_of_an_environment_that_is_none_is_damage(planned, tmp_path):
    finish(planned[0], 1.0, environment=RAN_IN)
    write_record(record_of(planned, ["val/loss"], {}), tmp_path / "out")
    path = tmp_path / "out" / "comparison.json"
    path.write_text(path.read_text().replace('"environment": 0', '"environment": 1'))
    with pytest.raises(UsageError, match="environment 1, of 1"):
        read_record(tmp_path / "out")


def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True
        ).stdout

    package = tmp_path / "attention_modules"
    package.mkdir()
    code, other, new = package / "code.py", tmp_path / "other.py", package / "new.py"
    code.write_text("1")
    assert commit_of(code) == ("", False, "")  # no checkout
    git("init", "--quiet")
    assert commit_of(code) == ("", False, "")  # not tracked: installed into an environment inside another project
    git("add", "attention_modules/code.py")
    git("commit", "--quiet", "-m", "m")
    other.write_text("2")
    commit = git("rev-parse", "HEAD").strip()
    assert commit_of(code) == (commit, False, "")
    states = []
    for file, text in ((code, "3"), (code, "4"), (new, "5"), (new, "6")):  # each a state of its own
        file.write_text(text)
        states.append(commit_of(code))
    assert [each[:2] for each in states] == [(commit, True)] * 4
    assert len({each[2] for each in states}) == 4
    (package / ".#code.py").symlink_to("nowhere")  # of an editor
    assert commit_of(code)[:2] == (commit, True)
    (package / ".#code.py").unlink()
    other.write_text("7")
    assert commit_of(code) == states[-1]


def test_endpoints_that_were_changed_after_the_fact_are_named(planned, tmp_path, capsys):
    first = Endpoints("val/top1", {"val/top1": 0.02})
    now = Endpoints("val/loss", {"val/loss": 0.5})
    assert changed_endpoints(None, now, False) == []
    assert changed_endpoints(None, now, True) == [UNKNOWN]
    assert changed_endpoints(record_of(planned, ["val/loss"], {}), now, True) == [], "of an earlier version"
    assert changed_endpoints(record_of(planned, ["val/loss"], {}, endpoints=first), now, False) == []
    for cell in planned:
        finish(cell, 1.0)
    said = changed_endpoints(record_of(planned, ["val/loss"], {}, endpoints=first), now, True)
    assert said == [
        "the primary endpoint, from val/top1 to val/loss",
        "the margin of val/loss, from none to 0.5",
        "the margin of val/top1, from 0.02 to none",
    ]
    told = replace(now, changed=said)
    record = record_of(planned, ["val/loss"], {}, endpoints=told)
    write_record(record, tmp_path)
    kept = read_record(tmp_path)
    assert [*kept.endpoints.changed] == said
    assert changed_endpoints(kept, now, True) == said, "once is enough"
    write_tables(planned, ["val/loss"], {}, tmp_path, endpoints=told)
    text = (tmp_path / "summary.md").read_text()
    assert "Changed after cells had finished:\n\n- the primary endpoint, from val/top1 to val/loss\n" in text


@pytest.mark.parametrize("changed", [["x"] * 1001, ["x" * 1001], ["\x1b]0;x"], "x", [1]])
def test_changes_that_are_none_make_the_record_damaged(planned, tmp_path, changed):
    write_record(record_of(planned, ["val/loss"], {}), tmp_path)
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "changed": changed}))
    with pytest.raises(UsageError, match=r"comparison\.json is damaged"):
        read_record(tmp_path)
