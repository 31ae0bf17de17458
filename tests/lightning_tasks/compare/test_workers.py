"""Processes of a comparison: devices, interrupts, the end with the parent, and why one failed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.workers import VISIBLE, failure, run_cells, start_context, start_worker, worker_devices
from lightning_tasks.recipes.variants import Variant
from lightning_tasks.runs.environment import this_environment

ROOT = Path(__file__).resolve().parents[3]


def is_alive(pid):
    """Whether a process runs; one that ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the process under /proc")
def test_a_killed_comparison_leaves_nobody_at_work():
    code = (
        "import os, time\nfrom lightning_tasks.compare.workers import start_context\n"
        "from tests.lightning_tasks.compare.test_workers import in_worker\n"
        "context = start_context()\ncontext.set_forkserver_preload([])\n"
        "given = {**os.environ}, None, ('', False), time.sleep, 60\n"
        "worker = context.Process(target=in_worker, args=given)\nworker.start()\n"
        "print(worker.pid, flush=True)\nworker.join()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)


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


def in_worker(environment, device, code, function, *arguments):
    start_worker(environment, device, code)
    function(*arguments)


def look_around(told):
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    code = this_environment().code
    told.send((os.environ.get(VISIBLE), ignored, multiprocessing.get_start_method(allow_none=True), code))


def test_a_worker_sees_its_own_device_alone(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,7,9")
    context = start_context()
    here, there = context.Pipe()
    given = {**os.environ}, worker_devices(2, 3, os.environ[VISIBLE])[1], ("0123", True, "4567"), look_around, there
    context.Process(target=in_worker, args=given).start()
    # The code is the parent's, whatever the checkout has by now.
    assert here.recv() == ("7", True, None, "0123 with changes 4567")
    assert os.environ[VISIBLE] == "4,7,9"


def test_nothing_passes_from_one_cell_to_the_next(cells):
    """Neither switches of torch nor what anybody's modules hold, whatever number of processes there is."""
    seen = []
    for cell in cells:
        given = {"class_path": "tests.lightning_tasks.demo.WriteState", "init_args": {"folder": str(cell.folder)}}
        seen.append(replace(cell, overrides=(f"--trainer.callbacks+={json.dumps(given)}",)))
    assert run_cells(seen, 1) == []
    assert [(cell.folder / "state.txt").read_text() for cell in seen] == ["1 torch.float32"] * len(seen)


def test_cells_are_told_how_many_devices_there_are(cells, monkeypatch):
    """A worker of a machine with three devices hands one to its cell."""
    monkeypatch.setattr("lightning_tasks.compare.workers._cuda_count", lambda: 3)
    monkeypatch.setenv(VISIBLE, "6,7,8")
    seen = {"class_path": "tests.lightning_tasks.demo.WriteDevice", "init_args": {"folder": str(cells[0].folder)}}
    cell = replace(cells[0], overrides=(f"--trainer.callbacks+={json.dumps(seen)}",))
    assert run_cells([cell], 1) == []
    assert (cell.folder / "device.txt").read_text() == "6"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills its own process")
@pytest.mark.parametrize(("jobs", "number", "name"), [(1, 35, "signal 35"), (2, 9, "SIGKILL")])
def test_a_cell_that_ends_its_process_fails_alone(cells, jobs, number, name, capfd):
    """As one that runs out of memory is killed."""
    kill = {"class_path": "tests.lightning_tasks.demo.Signal", "init_args": {"number": number, "step": 1}}
    slow, fast, watched = cells
    killed = replace(fast, overrides=(f"--trainer.callbacks+={json.dumps(kill)}",))
    ((cell, text),) = run_cells([killed, slow, watched], jobs)
    assert cell == killed
    assert f"its process was ended by {name}" in text
    assert slow.is_finished()
    assert watched.is_finished()
    assert capfd.readouterr().err.count("failed: ") == 1


def test_code_that_is_edited_while_others_run_ends_those_that_come_later(cells, tmp_path):
    """One process runs all: the first edits a file that the second names."""
    file = tmp_path / "named.yaml"
    file.write_text("limit_val_batches: 1\n")
    edit = {"class_path": "tests.lightning_tasks.demo.EditFile", "init_args": {"path": str(file)}}
    first = replace(cells[0], overrides=(f"--trainer.callbacks+={json.dumps(edit)}",))
    second = replace(cells[1], overrides=(f"--trainer={file}",))
    ((cell, text),) = run_cells([first, second], 1)
    assert cell == second
    assert f"{file} changed while the comparison ran; the same command goes on with it" in text


def test_a_thread_that_a_cell_leaves_keeps_no_other_waiting(cells, monkeypatch):
    monkeypatch.setattr("lightning_tasks.compare.workers._END", 0.5)
    leaves = {"class_path": "tests.lightning_tasks.demo.LeaveThread"}
    left = replace(cells[0], overrides=(f"--trainer.callbacks+={json.dumps(leaves)}",))
    before = time.monotonic()
    assert run_cells([left, cells[1]], 1) == []
    assert left.is_finished()
    assert time.monotonic() - before < 500


def test_what_only_ends_a_process_says_why_in_the_log(demo, tmp_path):
    (cell,) = plan_cells([Variant("a", str(demo))], [0], tmp_path)
    assert failure(cell, SystemExit(2)) == "nothing was printed (SystemExit: 2)"
    cell.folder.mkdir(parents=True)
    cell.log.write_text("usage: x\nerror: no room\n")
    assert failure(cell, SystemExit(2)) == "error: no room (SystemExit: 2)"
