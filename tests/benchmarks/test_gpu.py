"""The GPU day without a GPU: rows that go on after a fault or a kill, the script's states, and its page."""

import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from benchmarks.rows import CRASHED, OK, LeftOutError, Rows
from docs.pages.__main__ import main as pages
from docs.pages.language import NOTHING

ROOT = Path(__file__).resolve().parents[2]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def raised(error):
    def call():
        raise error

    return call


def test_no_row_is_measured_twice_and_none_ends_the_others(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    table = Rows(path)
    assert table.measure({"n": "1"}, lambda: {"ms": "2"})["state"] == OK
    table.measure({"n": "2"}, raised(torch.OutOfMemoryError("CUDA out of memory")))
    table.measure({"n": "3"}, raised(LeftOutError("not causal")))
    table.measure({"n": "4"}, raised(ModuleNotFoundError("No module named 'litgpt'")))
    table.measure({"n": "5"}, lambda: {"MiB": "7"})
    found = {"1": OK, "2": "out of memory", "3": "not causal", "4": "ModuleNotFoundError: No module named 'litgpt'"}
    assert {row["n"]: row["state"] for row in read(path)} == {**found, "5": OK}
    again = Rows(path)
    assert again.measure({"n": "1"}, raised(AssertionError))["ms"] == "2"
    assert again.measure({"n": "2"}, raised(AssertionError))["state"] == "out of memory"
    assert read(path)[4]["MiB"] == "7"


def test_a_lost_device_asks_for_a_new_process_and_keeps_the_row(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    with pytest.raises(SystemExit) as left:
        Rows(path).measure({"n": "1"}, raised(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert left.value.code == 3
    assert "illegal memory access" in read(path)[0]["state"]


def test_a_row_that_killed_the_process_is_not_tried_again_and_one_that_was_stopped_is(tmp_path):
    path = tmp_path / "rows.csv"
    with pytest.raises(SystemExit):
        Rows(path).measure({"n": "1"}, raised(SystemExit(143)))
    assert Rows(path).rows == []
    child = os.fork()
    if not child:
        Rows(path).measure({"n": "1"}, lambda: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert Rows(path).rows == [{"n": "1", "state": CRASHED}]
    assert Rows(path).measure({"n": "1"}, raised(AssertionError))["state"] == CRASHED


@pytest.mark.slow
def test_every_part_of_attention_writes_rows_and_the_page_has_them(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "docs" / "results" / "gpu"
    monkeypatch.setattr(gpu.Bench, "names", ["gated"])
    monkeypatch.setattr(gpu, "PATIENCE", math.inf)  # on a busy machine the first call alone takes a second
    for part in ("rpc", "mechanisms", "memory"):
        gpu.main([part, "--output", str(folder), "--dry"])
        assert {row["state"] for row in read(folder / f"{part}.csv")} == {OK}
    gpu.main(["about", "--output", str(folder)])
    log = tmp_path / "runs" / "locater_free" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text("step,val/perplexity,other\n1999,800.5,\n1999,,3\n19999,400.25,\n")
    gpu.main(["locater", "--output", str(folder), "--runs", str(tmp_path / "runs")])
    (folder / "parts.csv").write_text("part,state,seconds,limit\nrpc,stopped by its limit,9,9\nrpc,done,3,9\n")
    (folder / "tests.csv").write_text(
        "test,outcome,seconds,found,why\n"
        "test_mechanisms.py::test_near_its_float64[rpc-autocast bf16],passed,1,"
        "output=1e-3 gradient=2e-2 parameter=0.0,\n"
        "test_hosts.py::test_x[a],failed,1,,AssertionError: 1 | 2\n"
    )
    page = folder.with_suffix(".md")
    page.write_text((ROOT / "docs" / "results" / "gpu.md").read_text())
    assert pages(["build", "--root", str(tmp_path)]) == 0
    assert page.read_text().count(NOTHING) == 2, "nothing has trained, and a dry run compiles nothing"
    assert "| rpc | done | 3 | 9 |" in (folder / "appendix.md").read_text()
    assert pages(["check", "--root", str(tmp_path)]) == 0


def test_a_length_after_one_that_took_long_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu.Bench, "names", [])
    monkeypatch.setattr(gpu, "PATIENCE", 0.0)
    gpu.main(["memory", "--output", str(tmp_path), "--dry"])
    assert [row["state"][:16] for row in read(tmp_path / "memory.csv")[:2]] == [OK, "would take about"]


def test_without_a_gpu_nothing_but_a_dry_run_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["rpc", "--output", str(tmp_path)])
    assert "no CUDA device was found; --dry" in capsys.readouterr().err


STUB = """#!/bin/bash
# Stands for Python: says what it was asked for, and fails as a machine may.
echo "$*" >> "$LOG"
case "$*" in
*"-m pytest"*) exit 1 ;;
*wikitext2/baseline*) exit 2 ;;
*"benchmarks.gpu rpc"*) if [ -e "$LOG.rpc" ]; then exit 0; else touch "$LOG.rpc"; exit 3; fi ;;
*"benchmarks.gpu training"*)
    [ -e "$LOG.trained" ] && exit 0
    touch "$LOG.trained"
    echo $$ > "$LOG.sleeps"
    exec sleep 60 ;;
*"benchmarks.gpu mechanisms"*) kill -9 $$ ;;
esac
exit 0
"""


@pytest.fixture
def day(tmp_path):
    """The script with a stub for Python: starts it with so many seconds; `states` says how its parts ended."""
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    root, log = tmp_path / "root", tmp_path / "asked"
    environment = {**os.environ, "PYTHON": str(stub), "LOG": str(log), "TMPDIR": str(tmp_path)}

    def start(seconds):
        command = ["bash", "benchmarks/gpu_day.sh", "--dry", "--root", str(root)]
        limited = {**environment, "GPU_DAY_SECONDS": str(seconds)}
        return subprocess.Popen(command, cwd=ROOT, env=limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def states():
        return {row["part"]: row["state"] for row in read(root / "docs" / "results" / "gpu" / "parts.csv")}

    return SimpleNamespace(start=start, states=states, log=log)


def test_the_script_goes_on_after_faults_and_its_time(day):
    assert day.start(2).wait(60) == 0
    first = day.states()
    assert first == {
        "about": "done",
        "locater_free": "done",
        "locater_mean": "done",
        "locater_baseline": "failed with exit code 2",
        "tests": "done with failures",
        "rpc": "done",  # the second process went on
        "training": "stopped by its limit",
        "memory": "no time was left",
        "mechanisms": "no time was left",
    }
    day.log.write_text("")
    assert day.start(60).wait(60) == 0
    assert day.states() == {**first, "training": "done", "memory": "done", "mechanisms": "killed"}
    asked = day.log.read_text()
    assert "-m pytest" not in asked
    assert "benchmarks.gpu rpc" not in asked
    assert "docs.pages build --root" in asked


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_the_script_goes_on_after_it_was_ended(day, by):
    script, sleeps = day.start(60), day.log.with_suffix(".sleeps")
    for _ in range(300):
        if sleeps.is_file() and sleeps.read_text():
            break
        time.sleep(0.1)
    part = int(sleeps.read_text())
    script.send_signal(by)
    assert script.wait(60) == (143 if by == signal.SIGTERM else -by)
    if by == signal.SIGTERM:
        with pytest.raises(ProcessLookupError):
            os.kill(part, 0)
    else:
        os.kill(part, signal.SIGTERM)  # what a killed script leaves behind; the next call waits for it
    assert "training" not in day.states()
    assert day.start(60).wait(60) == 0
    assert day.states()["training"] == "done"


def test_the_script_names_a_wrong_argument_and_a_folder_that_cannot_be_written(tmp_path):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/bash\nexit 0\n")
    stub.chmod(0o755)
    (tmp_path / "file").write_text("")
    for arguments, said in (
        (["--dr"], "unknown argument --dr"),
        (["--dry", "--root", "/dev/null/x"], "cannot be written"),
    ):
        command = ["bash", "benchmarks/gpu_day.sh", *arguments]
        environment = {**os.environ, "PYTHON": str(stub), "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert said in done.stderr


@pytest.mark.slow
def test_the_dry_day(tiny_data, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "ATTNSWAP_DATA": str(tiny_data), "TMPDIR": str(tmp_path)}
    command = ["bash", "benchmarks/gpu_day.sh", "--dry", "--root", str(tmp_path / "root")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "root" / "docs" / "results" / "gpu" / "parts.csv")
    assert {row["state"] for row in found} == {"done"}, done.stdout
    assert NOTHING not in (tmp_path / "root" / "docs" / "results" / "gpu.md").read_text()
