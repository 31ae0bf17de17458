"""`attnswap compare` as a whole: run, resumed, interrupted, with cells that fail or diverge."""

import csv
import json
import math
import os
import re
import signal
import time
from dataclasses import asdict

import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare.cell import RESULT
from lightning_tasks.compare.reading import read_comparison
from lightning_tasks.compare.record import read_record
from lightning_tasks.recipes import COMPARISON_KEYS
from lightning_tasks.runs.environment import this_environment
from tests.lightning_tasks.programs import start_forked


def test_help_says_what_a_comparison_file_holds(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert not [key for key in COMPARISON_KEYS if f"  {key}: " not in printed]


def test_the_command_runs_resumes_and_writes_one_table(comparison, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["compare", str(comparison), "--seeds", "0:2", "--output", str(output), "--jobs", "2"]
    comparison.write_text(comparison.read_text() + "references: {watched: [fast 1e-1]}\n")
    main(command)
    with (output / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["config"], row["seed"]) for row in rows} == {
        (config, seed) for config in ("slow", "fast 1e-1", "watched") for seed in ("0", "1")
    }
    assert "| fast 1e-1 | 2 |" in (output / "summary.md").read_text()
    assert "Not paired" not in (output / "summary.md").read_text()
    with (output / "summary.csv").open() as file:
        pairs = [(row["config"], row["reference"]) for row in csv.DictReader(file) if row["metric"] == "val/loss"]
    assert pairs == [("slow", ""), ("fast 1e-1", "slow"), ("watched", "slow"), ("watched", "fast 1e-1")]

    record = read_record(output)
    assert (record.configs, record.seeds) == (["slow", "fast 1e-1", "watched"], [0, 1])
    assert record.references == {"watched": ["fast 1e-1"]}
    assert {cell.state for cell in record.cells} == {"finished"}
    assert len({(cell.seed, cell.initial_weights, cell.training_data) for cell in record.cells}) == 2
    assert all(cell.seconds > 0 for cell in record.cells)
    assert record.cells[0].checkpoint == "cells/slow/seed_0/last.ckpt"
    assert all((output / cell.checkpoint).is_file() for cell in record.cells)

    assert [asdict(each) for each in record.environments] == [asdict(this_environment())]
    assert {cell.environment for cell in record.cells} == {0}
    said = capsys.readouterr().err
    assert "6 cells, 0 finished; 6 more keep their last.ckpt (weights and optimizer; " in said
    assert "different commits" not in said

    kept, killed = (output / "cells" / name / "seed_1" / RESULT for name in ("slow", "watched"))
    seconds = json.loads(killed.read_text())["rows"]
    killed.unlink()
    result = json.loads(kept.read_text())
    kept.write_text(json.dumps({**result, "environment": {**result["environment"], "commit": "0" * 40}}))
    times = kept.stat().st_mtime_ns
    main([*command, "--no_checkpoints"])
    said = capsys.readouterr().err
    assert "6 cells, 5 finished\n" in said
    assert re.search("warning: the cells ran with the code of different commits: .*0000000000", said)
    assert kept.stat().st_mtime_ns == times
    assert json.loads(killed.read_text())["rows"] == seconds  # the same seed, the same numbers
    assert not killed.with_name("last.ckpt").exists()
    assert [cell.checkpoint for cell in read_record(output).cells if cell.variant == "watched"] == [
        "cells/watched/seed_0/last.ckpt",
        "",
    ]


@pytest.mark.slow
def test_more_seeds_of_some_variants_stand_beside_the_others(comparison, tmp_path, capsys):
    output = tmp_path / "out"
    comparison.write_text(comparison.read_text() + "references: {watched: [fast 1e-1]}\n")
    command = ["compare", str(comparison), "--output", str(output), "--jobs", "1"]

    def seeds():
        with (output / "results.csv").open() as file:
            return sorted({(row["config"], row["seed"]) for row in csv.DictReader(file)})

    with pytest.raises(SystemExit):
        main([*command, "--seeds", "0", "--variant", "fst 1e-1"])
    assert "--variant 'fst 1e-1' is none of the variants; the nearest are fast 1e-1" in capsys.readouterr().err
    assert not output.exists()
    main([*command, "--seeds", "0", "--variant", "fast 1e-1"])
    assert seeds() == [("fast 1e-1", "0"), ("slow", "0")]  # with the first, which it is compared with
    assert read_record(output).configs == ["slow", "fast 1e-1"]
    assert read_record(output).references == {}
    assert read_record(output).comparisons == 3  # those of `watched` count, though it has not run
    assert "Not finished" not in (output / "summary.md").read_text()

    main([*command, "--seeds", "0"])
    assert len(seeds()) == 3
    main([*command, "--seeds", "0:2", "--variant", "watched"])
    both = ["fast 1e-1", "slow", "watched"]
    assert seeds() == [(name, seed) for name in both for seed in ("0", "1")]  # fast 1e-1 is a reference of watched
    main([*command, "--seeds", "0:3", "--variant", "fast 1e-1"])
    assert [seed for name, seed in seeds() if name == "watched"] == ["0", "1"]
    assert [seed for name, seed in seeds() if name == "fast 1e-1"] == ["0", "1", "2"]
    assert "| watched | 2 |" in (output / "summary.md").read_text()
    main([*command, "--seeds", "3", "--variant", "fast 1e-1"])
    said = (output / "summary.md").read_text().partition("Finished, with other seeds than these tables:")[2]
    assert "- watched: seeds 0, 1" in said, "it has no cell in these tables"

    comparison.write_text(comparison.read_text() + "metrics: [val/loss]\nprimary: val/loss\n")
    main([*command, "--seeds", "0", "--plan"])  # which says so, too
    capsys.readouterr()
    main([*command, "--seeds", "0"])
    named = "changed after cells had finished: the primary endpoint, from none to val/loss"
    assert f"warning: {named}" in capsys.readouterr().err
    assert "Changed after cells had finished:\n\n- the primary endpoint" in (output / "summary.md").read_text()
    assert any(named in note for note in read_comparison(output).notes)


@pytest.mark.costly
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends a signal to a group of processes")
@pytest.mark.parametrize(
    ("jobs", "group"), [(1, True), pytest.param(2, False, marks=pytest.mark.slow)], ids=["group", "parent alone"]
)
def test_an_interrupt_ends_the_comparison_and_the_same_command_goes_on(demo, tmp_path, jobs, group):
    """As Ctrl-C sends it: to the workers too, in which Lightning would take it for the end of one fit."""
    hold = {"class_path": "tests.lightning_tasks.demo.Hold", "init_args": {"folder": str(tmp_path)}}
    path, output = tmp_path / "held.yaml", tmp_path / "out"
    variants = {"free": None, "held": {"trainer.callbacks+": hold}}
    path.write_text(yaml.safe_dump({"base": str(demo), "variants": variants}))
    command = ["compare", str(path), "--seeds", "0:2", "--output", str(output), "--jobs", str(jobs)]
    with start_forked("lightning_tasks", *command) as first:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("held_*"))) < jobs and time.monotonic() < deadline and first.running:
            time.sleep(0.05)
        (os.killpg if group else os.kill)(first.pid, signal.SIGINT)
        ended = first.finish(60)
    said = ended.stderr
    assert ended.returncode == 130, said
    assert f"interrupted: {jobs} of 4 cells are finished; the same command goes on" in said
    assert "Traceback" not in said
    finished = {path.parent: path.stat().st_mtime_ns for path in (output / "cells").rglob(RESULT)}
    assert sorted(str(path.relative_to(output)) for path in finished) == [f"cells/free/seed_{n}" for n in range(jobs)]
    with (output / "results.csv").open() as file:
        assert {(row["config"], int(row["seed"])) for row in csv.DictReader(file)} == {("free", n) for n in range(jobs)}
    assert "Not finished:\n\n- " in (output / "summary.md").read_text()
    assert "- held seed 0\n" in (output / "summary.md").read_text()
    states = [(cell.variant, cell.seed, cell.state) for cell in read_record(output).cells]
    finished_now = [("free", n) for n in range(jobs)]
    assert [cell[:2] for cell in states if cell[2] == "finished"] == finished_now
    assert {cell[2] for cell in states if cell[:2] not in finished_now} == {"waiting"}
    if group:
        (tmp_path / "release").touch()
        main(command)
        assert len(list((output / "cells").rglob(RESULT))) == 4
        assert all((path / RESULT).stat().st_mtime_ns == time for path, time in finished.items())
        assert "Not finished" not in (output / "summary.md").read_text()


def test_a_failed_cell_leaves_the_others(comparison, demo, tmp_path, capfd):
    content = yaml.safe_load(comparison.read_text())
    content["variants"]["broken"] = {"model.rate": -1.0}
    comparison.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(SystemExit, match="1 of 4 cells failed") as stop:
        main(["compare", str(comparison), "--seeds", "0", "--output", str(tmp_path / "out")])
    for text in (capfd.readouterr().err, str(stop.value)):
        (broken,) = [line for line in text.splitlines() if "broken seed 0: " in line]
        assert "ValueError: Invalid learning rate: -1.0" in broken
        assert str(tmp_path / "out" / "cells" / "broken" / "seed_0" / "log.txt") in broken
    assert "slow" in (tmp_path / "out" / "results.csv").read_text()
    states = {cell.variant: cell.state for cell in read_record(tmp_path / "out").cells}
    assert states == {"slow": "finished", "fast 1e-1": "finished", "watched": "finished", "broken": "failed"}


def test_a_reason_for_which_every_cell_fails_is_said_once(demo, tmp_path, capfd):
    """As where the data set is missing: the others are named without it."""
    with pytest.raises(SystemExit, match="2 of 2 cells failed") as stop:
        main(["compare", str(demo), "--seeds", "0,1", "--set", "model.rate=-1.0", "--output", str(tmp_path / "out")])
    (line,) = str(stop.value).splitlines()[1:]
    assert "demo seed 0 and 1 more: ValueError: Invalid learning rate: -1.0" in line
    said = capfd.readouterr().err
    assert said.count("Invalid learning rate") == 1
    assert "failed: demo seed 1: as demo seed 0" in said


def test_a_typing_error_in_any_configuration_is_refused_before_the_first_runs(comparison, tmp_path, capsys):
    content = yaml.safe_load(comparison.read_text())
    content["variants"] |= {"mistyped": {"model.nothing": 1}, "unbuilt": {"model.note": "fail"}}
    comparison.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(SystemExit):
        main(["compare", str(comparison), "--seeds", "0", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().err
    assert "nothing was run, as configurations are refused: mistyped, unbuilt" in printed
    assert "Option 'nothing' is not accepted" in printed
    assert "the module's own" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["fast_dev_run", "barebones"])
def test_a_trial_that_logs_nothing_is_refused_by_name(flag, demo, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["compare", str(demo), "--set", f"trainer.{flag}=true", "--output", str(tmp_path / "out")])
    assert "trainer.fast_dev_run and trainer.barebones log nothing" in capsys.readouterr().err


def test_cells_that_diverge_are_results_of_a_comparison(demo, tmp_path, capsys):
    guard = {"class_path": "lightning_tasks.callbacks.NonFiniteGuard"}
    broken = {"model.rate": math.nan}
    variants = {"whole": None, "unguarded": broken, "guarded": {**broken, "trainer.callbacks+": guard}}
    path, out = tmp_path / "diverging.yaml", tmp_path / "out"
    content = {"base": str(demo), "variants": variants, "metrics": ["val/loss"], "test": True}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    main(["compare", str(path), "--seeds", "0", "--output", str(out), "--set", "trainer.log_every_n_steps=1"])
    printed = capsys.readouterr().out
    assert "- unguarded seed 0: " in printed
    assert "- guarded seed 0: stopped at step 1: a loss or gradient was not finite" in printed
    assert "Not paired" not in printed
    assert "Not finished" not in printed
    verdicts = {row["config"]: row["diverged"] for row in csv.DictReader((out / "summary.csv").open())}
    assert verdicts == {"whole": "0", "unguarded": "1", "guarded": "1"}
    result = json.loads((out / "cells/guarded/seed_0/result.json").read_text())
    assert result["stopped"].startswith("step 1 (epoch 0, batch 1): the loss is nan")
    page = tmp_path / "report.html"
    main(["report", str(out), "--output", str(page)])
    assert "not finite" in page.read_text()
    assert "guarded seed 0 diverged: stopped at step 1" in page.read_text()


def test_metrics_that_were_never_logged_are_named(comparison, tmp_path, capsys):
    arguments = [str(comparison), "--seeds", "0:1", "--output", str(tmp_path / "out"), "--metrics"]
    with pytest.raises(SystemExit, match="the summary is empty"):
        main(["compare", *arguments, "val/los"])
    assert "never logged: val/los; Did you mean 'val/loss'" in capsys.readouterr().err
    main(["compare", *arguments, "val/loss,val/absent"])
    assert "never logged: val/absent" in capsys.readouterr().err
