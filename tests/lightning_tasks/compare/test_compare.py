"""Comparisons: what a file stands for, pairs, resuming after a kill, and statistics against closed forms."""

import contextlib
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_tasks.__main__ import main
from lightning_tasks.compare.cell import RESULT, last_error, run_cell
from lightning_tasks.compare.command import (
    KEYS,
    Variant,
    override_arguments,
    parse_seeds,
    plan_cells,
    read_variants,
    summary_references,
    unpaired_seeds,
)
from lightning_tasks.compare.statistics import (
    last_values,
    markdown,
    minimum_detectable_effect,
    paired_interval,
    summarise,
)
from lightning_tasks.compare.workers import VISIBLE, failure, run_cells, start_worker, worker_devices
from lightning_tasks.errors import UsageError
from lightning_tasks.figures.curves import curve
from lightning_tasks.runs.divergence import STOPPED, diverged_cells, diverged_configs, with_stops
from lightning_tasks.runs.log import read_metrics

ROOT = Path(__file__).resolve().parents[3]
DEMO = "tests.lightning_tasks.demo.DemoModule"


@pytest.fixture
def demo(tmp_path):
    trainer = {"accelerator": "cpu", "max_steps": 2, "limit_train_batches": 2, "limit_val_batches": 1}
    path = tmp_path / "demo.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": DEMO}, "trainer": trainer}))
    return path


@pytest.fixture
def comparison(demo, tmp_path):
    variants = {
        "slow": None,
        "fast 1e-1": {"model.rate": 0.5},
        "watched": {"trainer.callbacks+": {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}},
    }
    path = tmp_path / "comparison.yaml"
    path.write_text(yaml.safe_dump({"base": str(demo), "variants": variants}, sort_keys=False))
    return path


# -- what was asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seeds"), [("0:3", [0, 1, 2]), ("4,2", [4, 2]), ("7", [7])])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["3:3", "a", "1,1", "0:2:4", ""])
def test_seeds_that_make_no_sense(text):
    with pytest.raises(UsageError, match="--seeds"):
        parse_seeds(text)


def test_overrides_are_spelled_as_on_the_command_line():
    assert override_arguments({"model.attention": "rpc", "trainer.callbacks+": {"a": 1}, "model.rate": 0.1}) == (
        "--model.attention=rpc",
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


@pytest.mark.parametrize(
    "content",
    [
        "variants: {a: {}}",
        "base: demo\nvariants: [a]",
        "base: demo\nvariants: {}",
        "base: demo\nvariants: {a: {}}\ntest: 1",
        "base: demo\nvariants: {a: {}}\nmore: 1",
        "base: demo\nvariants: {a: [1]}",
        "base: demo\nvariants: {a: {}}\nmetrics:",
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


def test_references_make_no_other_cells_and_may_be_numbers(comparison, tmp_path):
    content = yaml.safe_load(comparison.read_text())
    content["variants"][0.5] = None
    comparison.write_text(yaml.safe_dump(content))
    before = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    comparison.write_text(yaml.safe_dump({**content, "references": {0.5: ["watched"]}}))
    after = plan_cells(read_variants(str(comparison)), [0], tmp_path)
    assert [cell.fingerprint for cell in after] == [cell.fingerprint for cell in before]
    assert summary_references([str(comparison)]) == {"0.5": ["watched"]}


def test_help_says_what_a_comparison_file_holds(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    assert not [key for key in KEYS if f"  {key}: " not in printed]


def test_a_run_that_diverged_is_in_the_table(tmp_path):
    log = tmp_path / "metrics.csv"
    log.write_text("step,epoch,val/loss\n1,0,4.0\n2,0,nan\n3,0,\n")
    rows = [{"config": "a", "seed": 0, **row} for row in read_metrics(log)]
    assert [row["step"] for row in rows] == [1, 2]
    assert math.isnan(last_values(rows, "val/loss")["a"][0])


def test_two_configurations_of_one_folder(demo, tmp_path):
    with pytest.raises(UsageError, match="with _ for other signs, got a b, a_b"):
        plan_cells([Variant("a b", str(demo)), Variant("a_b", str(demo))], [0], tmp_path)


def test_two_configurations_of_one_name(demo, tmp_path):
    with pytest.raises(UsageError, match="different names"):
        plan_cells([Variant("a", str(demo)), Variant("a", str(demo))], [0], tmp_path)


# -- running -----------------------------------------------------------------------------------------------------------


def is_alive(pid):
    """Whether a process runs; one that ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def cells(comparison, tmp_path):
    return plan_cells(read_variants(str(comparison)), [0], tmp_path / "out")


def test_a_finished_cell_has_one_whole_result(cells):
    slow = cells[0]
    assert not slow.is_finished()
    run_cell(slow)
    assert slow.is_finished()
    assert {row["metric"] for row in slow.result()["rows"]} >= {"val/loss", "val/perplexity"}
    assert not list(slow.folder.rglob("*.ckpt"))
    assert (slow.folder / "log.txt").is_file()


def test_a_cell_can_test_what_it_fitted(cells):
    fitted, tested = cells[0], replace(cells[0], test=True)
    run_cell(fitted)
    assert not tested.is_finished()
    run_cell(tested)
    assert "test/loss" in {row["metric"] for row in tested.result()["rows"]}


def test_one_seed_means_one_start_and_one_order_of_the_data(cells):
    for cell in cells:
        run_cell(cell)
    slow, fast, watched = (cell.result() for cell in cells)
    assert slow["initial_weights"] == fast["initial_weights"] == watched["initial_weights"]
    assert slow["training_data"] == fast["training_data"] == watched["training_data"]
    assert slow["rows"] != fast["rows"]
    assert unpaired_seeds(cells) == []


def test_cells_that_are_no_pair_are_named(demo, tmp_path):
    wide = Variant("wide", str(demo), ("--model.init_bias=true",))
    cells = plan_cells([Variant("plain", str(demo)), wide], [0], tmp_path / "out")
    for cell in cells:
        run_cell(cell)
    assert unpaired_seeds(cells) == ["wide seed 0: initial weights differ from those of plain"]


def test_cells_that_are_no_pair_are_named_where_the_first_configuration_is_missing(demo, tmp_path):
    """References pair what is there: the second with the third, say."""
    wide = Variant("wide", str(demo), ("--model.init_bias=true",))
    cells = plan_cells([Variant("plain", str(demo)), Variant("other", str(demo)), wide], [0, 1], tmp_path / "out")
    for cell in cells[:2] + cells[4:]:
        run_cell(cell)
    assert unpaired_seeds(cells) == ["wide seed 1: initial weights differ from those of other"]


def test_another_setting_makes_another_cell(cells, comparison, tmp_path):
    run_cell(cells[0])
    changed = plan_cells(read_variants(str(comparison)), [0], tmp_path / "out", ["--trainer.max_steps=1"])
    assert not changed[0].is_finished()


def test_a_comment_or_another_place_makes_no_other_cell(cells, tmp_path):
    moved = tmp_path / "moved.yaml"
    moved.write_text("# said otherwise\n" + Path(cells[0].config).read_text())
    assert replace(cells[0], config=str(moved)).fingerprint == cells[0].fingerprint
    moved.write_text(moved.read_text() + "\nckpt_path: other\n")
    assert replace(cells[0], config=str(moved)).fingerprint != cells[0].fingerprint


def test_a_half_written_cell_is_run_again(cells):
    cell = cells[0]
    (cell.folder / "runs").mkdir(parents=True)
    (cell.folder / f"{RESULT}.partial").write_text('{"rows": [')
    assert not cell.is_finished()
    run_cell(cell)
    assert cell.is_finished()
    assert not (cell.folder / f"{RESULT}.partial").exists()


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

    kept, killed = (output / "cells" / name / "seed_1" / RESULT for name in ("slow", "watched"))
    times, seconds = kept.stat().st_mtime_ns, json.loads(killed.read_text())["rows"]
    killed.unlink()
    main(command)
    assert kept.stat().st_mtime_ns == times
    assert json.loads(killed.read_text())["rows"] == seconds  # the same seed, the same numbers


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process under /proc")
def test_a_killed_comparison_leaves_nobody_at_work():
    code = (
        "import os\nfrom time import sleep\nfrom lightning_tasks.compare.cell import end_with_parent\n"
        "parent, worker = os.getpid(), os.fork()\n"
        "if worker == 0:\n    end_with_parent(parent, 0.05)\nelse:\n    print(worker, flush=True)\n"
        "sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends a signal to a group of processes")
@pytest.mark.parametrize(("jobs", "group"), [(1, True), (2, False)], ids=["group", "parent alone"])
def test_an_interrupt_ends_the_comparison_and_the_same_command_goes_on(demo, tmp_path, jobs, group):
    """As Ctrl-C sends it: to the workers too, in which Lightning would take it for the end of one fit."""
    hold = {"class_path": "tests.lightning_tasks.demo.Hold", "init_args": {"folder": str(tmp_path)}}
    path, output = tmp_path / "held.yaml", tmp_path / "out"
    variants = {"free": None, "held": {"trainer.callbacks+": hold}}
    path.write_text(yaml.safe_dump({"base": str(demo), "variants": variants}))
    command = ["compare", str(path), "--seeds", "0:2", "--output", str(output), "--jobs", str(jobs)]
    # A shell's background jobs, as these tests may be one, ignore SIGINT, and so would what they start.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lightning_tasks.__main__ import main; main(sys.argv[1:])"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # not by `cwd`: a configuration is read in its own folder
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("held_*"))) < jobs and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.05)
        (os.killpg if group else os.kill)(first.pid, signal.SIGINT)
        said = first.communicate(timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 130, said
    assert f"interrupted: {jobs} of 4 cells are finished; the same command goes on" in said
    assert "Traceback" not in said
    finished = {path.parent: path.stat().st_mtime_ns for path in (output / "cells").rglob(RESULT)}
    assert sorted(str(path.relative_to(output)) for path in finished) == [f"cells/free/seed_{n}" for n in range(jobs)]
    with (output / "results.csv").open() as file:
        assert {(row["config"], int(row["seed"])) for row in csv.DictReader(file)} == {("free", n) for n in range(jobs)}
    assert "Not finished:\n\n- " in (output / "summary.md").read_text()
    assert "- held seed 0\n" in (output / "summary.md").read_text()
    if group:
        (tmp_path / "release").touch()
        main(command)
        assert len(list((output / "cells").rglob(RESULT))) == 4
        assert all((path / RESULT).stat().st_mtime_ns == time for path, time in finished.items())
        assert "Not finished" not in (output / "summary.md").read_text()


@pytest.mark.parametrize(
    ("jobs", "count", "visible", "devices"),
    [
        (2, 0, None, [None, None]),
        (2, 0, "", [None, None]),
        (5, 3, None, ["0", "1", "2", "0", "1"]),
        (1, 4, None, ["0"]),
        (3, 2, "5, GPU-8a", ["5", "GPU-8a", "5"]),
        (2, 1, "3,-1,2", ["3", "3"]),  # CUDA sees nothing from the first unknown one on
    ],
)
def test_workers_take_the_devices_in_turn(jobs, count, visible, devices):
    assert worker_devices(jobs, count, visible) == devices


def seen_by_a_worker(seconds):
    time.sleep(seconds)
    return os.environ.get(VISIBLE), signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_worker_sees_its_own_device_alone(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,7,9")
    context = get_context("spawn")
    devices = context.SimpleQueue()
    for device in worker_devices(2, 3, os.environ[VISIBLE]):
        devices.put(device)
    with ProcessPoolExecutor(2, context, initializer=start_worker, initargs=(os.getpid(), devices)) as pool:
        assert set(pool.map(seen_by_a_worker, [1.0] * 4)) == {("4", True), ("7", True)}
    assert os.environ[VISIBLE] == "4,7,9"


def test_cells_are_told_how_many_devices_there_are(cells, monkeypatch):
    """A worker of a machine with three devices hands one to its cell."""
    monkeypatch.setattr("lightning_tasks.compare.workers._cuda_count", lambda: 3)
    monkeypatch.setenv(VISIBLE, "6,7,8")
    seen = {"class_path": "tests.lightning_tasks.demo.WriteDevice", "init_args": {"folder": str(cells[0].folder)}}
    cell = replace(cells[0], overrides=(f"--trainer.callbacks+={json.dumps(seen)}",))
    assert run_cells([cell], 1) == []
    assert (cell.folder / "device.txt").read_text() == "6"


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("usage: x\nerror: Parser key:\n  Key 'a' is not expected\n\n", "error: Parser key: Key 'a' is not expected"),
        ("step 1\nattnswap: error: no such file\n", "attnswap: error: no such file"),
        ("Traceback:\n  line\nKeyError: 'x'\nValueError: bad\n", "ValueError: bad"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_the_error_that_a_log_ends_with(printed, error):
    assert last_error(printed) == error


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


def test_what_only_ends_a_process_says_why_in_the_log(demo, tmp_path):
    (cell,) = plan_cells([Variant("a", str(demo))], [0], tmp_path)
    assert failure(cell, SystemExit(2)) == f"nothing was printed (SystemExit: 2); log: {cell.log}"
    cell.folder.mkdir(parents=True)
    cell.log.write_text("usage: x\nerror: no room\n")
    assert failure(cell, SystemExit(2)) == f"error: no room (SystemExit: 2); log: {cell.log}"


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


# -- the table ---------------------------------------------------------------------------------------------------------


def rows_of(values):
    return [
        {"config": config, "seed": seed, "step": step, "metric": "m", "value": value + step}
        for config, seeds in values.items()
        for seed, value in enumerate(seeds)
        for step in (1, 0)
    ]


def test_the_last_step_counts():
    assert last_values(rows_of({"a": [5.0]}), "m") == {"a": {0: 6.0}}


def test_paired_interval_of_a_known_sample():
    # Mean 2, standard deviation 1, n = 3: 2 -+ t(0.975, 2) / sqrt(3), t = 4.302653.
    assert paired_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-5)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([-1.0, -1.1, -0.9], "lower"),
        ([1.0, 1.1, 0.9], "higher"),
        ([-1.0, 1.2, 0.1], "budget too small"),
        ([0.0, 0.0, 0.0], "equal"),
        ([1.0], ""),
        ([0.0, 0.92, 1.84], "budget too small"),
        ([0.1, 0.9, 0.8, 0.2, 1.0], "higher, but budget too small"),
        ([0.1, math.nan, 0.2], "diverged"),
        ([0.1, math.inf, 0.2], "diverged"),
        ([-math.inf], "diverged"),
    ],
)
def test_the_verdict_follows_the_paired_interval(differences, verdict):
    rows = [
        {
            "config": config,
            "seed": seed,
            "step": 1,
            "metric": "m",
            "value": 5.0 + (difference if config == "b" else 0.0),
        }
        for seed, difference in enumerate(differences)
        for config in ("a", "b")
    ]
    _, row = summarise(rows, ["a", "b"], ["m"])
    assert row.verdict == verdict
    assert markdown([row]).splitlines()[-1].endswith(f"| {verdict} |")


def logged(config, seed, **values):
    """Rows of a cell, each metric at its steps: ``val_loss=[(step, value)]``."""
    names = {"val_loss": "val/loss", "val_top1": "val/top1", "stopped": STOPPED, "entropy": "attention/entropy"}
    return [
        {"config": config, "seed": seed, "step": step, "metric": names[name], "value": value}
        for name, points in values.items()
        for step, value in points
    ]


DIVERGED = [
    *logged("a", 0, val_loss=[(5, 2.0), (10, 1.0)], val_top1=[(10, 0.9)]),
    *logged("a", 1, val_loss=[(5, 2.0), (10, 1.0)], val_top1=[(10, 0.9)], entropy=[(10, 1.0)]),
    *logged("b", 0, val_loss=[(5, 2.0), (10, math.nan)], val_top1=[(10, 0.1)]),
    *logged("b", 1, val_loss=[(5, 2.0), (10, 1.5)], val_top1=[(10, 0.8)]),
    *logged("c", 0, stopped=[(3, 1.0)]),
    *logged("c", 1, val_loss=[(5, 2.5), (10, 1.2)], val_top1=[(10, 0.7)]),
]


def test_a_run_that_diverged_is_said_to_for_each_of_its_metrics():
    """By its loss, or by the guard that stopped it; accuracies of NaN are numbers, and say nothing."""
    texts = {("b", 0): "val/loss is nan at step 10", ("c", 0): "stopped at step 3: a loss or gradient was not finite"}
    assert diverged_cells(DIVERGED) == texts
    summary = summarise(
        with_stops(DIVERGED), ["a", "b", "c"], ["val/loss", "val/top1", "attention/entropy"], {"a": ["b"]}
    )
    found = [(row.metric, row.config, row.reference, row.seeds, row.diverged, row.verdict) for row in summary]
    assert found == [
        ("val/loss", "a", "", 2, 0, ""),
        ("val/loss", "a", "b", 2, 0, "reference diverged"),
        ("val/loss", "b", "a", 2, 1, "diverged"),
        ("val/loss", "c", "a", 2, 1, "diverged"),
        ("val/top1", "a", "", 2, 0, ""),
        ("val/top1", "a", "b", 2, 0, "reference diverged"),
        ("val/top1", "b", "a", 2, 1, "diverged"),
        ("val/top1", "c", "a", 2, 1, "diverged"),
        ("attention/entropy", "a", "", 1, 0, ""),
        ("attention/entropy", "a", "b", 1, 0, ""),
    ]
    assert [row.pairs for row in summary[:4]] == [0, 2, 2, 2]  # no seed is left out
    assert math.isnan(summary[3].mean)
    assert "| c | 2, 1 diverged | nan | a | +nan [+nan, +nan] | nan | diverged |" in markdown(summary)


def test_a_stopped_run_has_nan_where_others_went_on():
    rows = with_stops(DIVERGED)
    assert rows[: len(DIVERGED)] == DIVERGED
    added = [(row["config"], row["seed"], row["metric"], row["step"]) for row in rows[len(DIVERGED) :]]
    assert added == [("c", 0, "val/loss", 5), ("c", 0, "val/loss", 10), ("c", 0, "val/top1", 10)]
    assert all(math.isnan(row["value"]) for row in rows[len(DIVERGED) :])
    assert with_stops(DIVERGED[:5]) == DIVERGED[:5]
    steps, means, _ = curve(rows, "val/loss", "c")
    assert (steps.tolist(), np.isnan(means).tolist()) == ([5, 10], [True, True])
    assert diverged_configs(rows) == {"b": " (1 of 2 diverged)", "c": " (1 of 2 diverged)"}


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


def test_minimum_detectable_effect_of_the_textbook():
    # A paired t-test of 34 pairs finds half a standard deviation with power 0.8 (Cohen's tables: n = 34).
    assert minimum_detectable_effect(2.0, 34) == pytest.approx(2.0 * 0.4949, rel=2e-3)
    assert minimum_detectable_effect(1.0, 8) == pytest.approx(1.1560, rel=1e-3)
    assert minimum_detectable_effect(1.0, 2) == pytest.approx(11.55, rel=1e-3)  # by integration over chi
    assert minimum_detectable_effect(0.0, 8) == 0.0


def test_differences_are_paired_by_seed():
    # Differences 1, 2, 3 whatever the large spread between seeds.
    summary = summarise(rows_of({"a": [0.0, 100.0, 1000.0], "b": [1.0, 102.0, 1003.0]}), ["a", "b"], ["m", "absent"])
    first, second = summary
    assert (first.pairs, second.pairs, second.difference) == (0, 3, 2.0)
    assert (second.low, second.high) == pytest.approx(paired_interval([1.0, 2.0, 3.0]))
    assert math.isnan(first.difference)
    assert "| b | 3 | 369.67 ± 5.5e+02 | a | +2 [-0.4841, +4.484] |" in markdown(summary)


def test_a_named_reference_is_paired_as_the_first_is():
    rows = rows_of({"a": [0.0, 0.0, 0.0], "b": [1.0, 102.0, 1003.0], "c": [2.0, 104.0, 1006.0]})
    *_, to_first, to_named = summarise(rows, ["a", "b", "c"], ["m"], {"c": ["b"]})
    assert (to_first.config, to_first.reference, to_first.difference) == ("c", "a", pytest.approx(1112 / 3))
    assert (to_named.config, to_named.reference, to_named.pairs, to_named.difference) == ("c", "b", 3, 2.0)
    assert (to_named.low, to_named.high) == pytest.approx(paired_interval([1.0, 2.0, 3.0]))
    assert to_named.detectable == pytest.approx(minimum_detectable_effect(1.0, 3))
    assert to_named.verdict == "budget too small"
    assert "| c | 3 | 371.67 ± 5.5e+02 | b | +2 [-0.4841, +4.484] |" in markdown([to_named])


def test_one_seed_has_no_interval():
    _, second = summarise(rows_of({"a": [1.0], "b": [2.0]}), ["a", "b"], ["m"])
    assert second.pairs == 0
    assert math.isnan(second.std)


def test_metrics_that_were_never_logged_are_named(comparison, tmp_path, capsys):
    arguments = [str(comparison), "--seeds", "0:1", "--output", str(tmp_path / "out"), "--metrics"]
    with pytest.raises(SystemExit, match="the summary is empty"):
        main(["compare", *arguments, "val/los"])
    assert "never logged: val/los; Did you mean 'val/loss'" in capsys.readouterr().err
    main(["compare", *arguments, "val/loss,val/absent"])
    assert "never logged: val/absent" in capsys.readouterr().err
