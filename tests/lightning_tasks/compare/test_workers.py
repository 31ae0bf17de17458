"""Processes of a comparison: devices, interrupts, the end with the parent, and why one failed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
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
        "import os, time\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "from lightning_tasks.compare.workers import start_context, start_worker\n"
        "context = start_context()\ncontext.set_forkserver_preload([])\ndevices = context.SimpleQueue()\n"
        "devices.put(None)\ninitial = {**os.environ}, devices, ('', False)\n"
        "pool = ProcessPoolExecutor(1, context, start_worker, initial)\n"
        "print(pool.submit(os.getpid).result(), flush=True)\npool.submit(time.sleep, 60).result()\n"
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


def seen_by_a_worker(folder, together):
    """When so many are at work, each in a process of its own."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < together and time.monotonic() < deadline:
        time.sleep(0.01)
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    code = this_environment().code
    return os.environ.get(VISIBLE), ignored, multiprocessing.get_start_method(allow_none=True), code


def test_a_worker_sees_its_own_device_alone(monkeypatch, tmp_path):
    monkeypatch.setenv(VISIBLE, "4,7,9")
    context = start_context()
    devices = context.SimpleQueue()
    for device in worker_devices(2, 3, os.environ[VISIBLE]):
        devices.put(device)
    initial = {**os.environ}, devices, ("0123", True, "4567")
    code = "0123 with changes 4567"  # of the parent, whatever the checkout has by now
    with ProcessPoolExecutor(2, context, initializer=start_worker, initargs=initial) as pool:
        seen = set(pool.map(seen_by_a_worker, [tmp_path] * 2, [2] * 2))
    assert seen == {("4", True, None, code), ("7", True, None, code)}
    assert os.environ[VISIBLE] == "4,7,9"


def test_cells_are_told_how_many_devices_there_are(cells, monkeypatch):
    """A worker of a machine with three devices hands one to its cell."""
    monkeypatch.setattr("lightning_tasks.compare.workers._cuda_count", lambda: 3)
    monkeypatch.setenv(VISIBLE, "6,7,8")
    seen = {"class_path": "tests.lightning_tasks.demo.WriteDevice", "init_args": {"folder": str(cells[0].folder)}}
    cell = replace(cells[0], overrides=(f"--trainer.callbacks+={json.dumps(seen)}",))
    assert run_cells([cell], 1) == []
    assert (cell.folder / "device.txt").read_text() == "6"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills its own process")
@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_cell_that_ends_its_process_fails_alone(cells, jobs, capfd):
    """As one that runs out of memory is killed; a pool of processes ends with any of its own."""
    kill = {"class_path": "tests.lightning_tasks.demo.Signal", "init_args": {"number": 9, "step": 1}}
    slow, fast, watched = cells
    killed = replace(fast, overrides=(f"--trainer.callbacks+={json.dumps(kill)}",))
    ((cell, text),) = run_cells([killed, slow, watched], jobs)
    assert cell == killed
    assert "BrokenProcessPool" in text
    assert slow.is_finished()
    assert watched.is_finished()
    assert capfd.readouterr().err.count("failed: ") == 1


def test_what_only_ends_a_process_says_why_in_the_log(demo, tmp_path):
    (cell,) = plan_cells([Variant("a", str(demo))], [0], tmp_path)
    assert failure(cell, SystemExit(2)) == "nothing was printed (SystemExit: 2)"
    cell.folder.mkdir(parents=True)
    cell.log.write_text("usage: x\nerror: no room\n")
    assert failure(cell, SystemExit(2)) == "error: no room (SystemExit: 2)"
