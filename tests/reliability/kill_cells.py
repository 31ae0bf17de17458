"""A comparison by commands on two working copies, whose workers are killed at random steps, ends as a serial one.

python -m tests.reliability.kill_cells [--kills 50] [--seeds 8] [--seed 0]

Three variants by the seeds. Each of two workers, each in a copy of the repository of its own, runs the commands of the
plan in an order of its own until all are finished. SIGKILL meets a worker, the cell that it runs, or both. Results
are compared byte by byte; steps are counted as they begin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("attention_modules", "lightning_tasks", "datamodules", "attnswap", "configs")
FILE = {
    "base": "quickstart/language_modeling",
    "variants": {
        "rpc": None,
        "slow": {"model.optimizer.init_args.lr": 1e-3},
        "small": {"model.model.init_args.num_layers": 1},
    },
    "settings": {
        "model.model.init_args.dim": 64,
        "model.model.init_args.num_tokens": 64,
        "data.init_args.num_tokens": 64,
        "data.init_args.batch_size": 8,
        "data.init_args.max_bytes": 200_000,
        "data.init_args.vocab_size": 256,
        "trainer.max_steps": 300,
        "trainer.val_check_interval": 50,
        "trainer.limit_val_batches": 2,
        "trainer.num_sanity_val_steps": 0,
        "trainer.callbacks+": {"class_path": "counting.CountSteps"},
    },
    "metrics": ["val/loss"],
    "checkpoints": False,
}
COUNTING = """
import os
from lightning.pytorch import Callback
class CountSteps(Callback):
    def on_train_batch_start(self, *arguments):
        with open(os.environ["COUNTED_STEPS"], "ab", buffering=0) as file:
            file.write(b".")
"""
WORKER = """
import random, shlex, subprocess, sys, time
lines = open(sys.argv[1]).read().splitlines()
random.Random(int(sys.argv[2])).shuffle(lines)
while lines:
    for line in list(lines):
        code = subprocess.run([sys.executable, "-m", *shlex.split(line)]).returncode
        if code == 0:
            lines.remove(line)
        elif code not in (75, -9):
            sys.exit(code)
    time.sleep(0.5)
"""


def attnswap(copy: Path, *arguments: str) -> str:
    """What a command prints, run with the code of a working copy."""
    command = [sys.executable, "-m", "attnswap", *arguments]
    done = subprocess.run(command, cwd=copy.parent, env=environment(copy), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2_000:]}")
    return done.stdout


def environment(copy: Path) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1", "ATTNSWAP_NUM_WORKERS": "0", "COUNTED_STEPS": str(copy.parent / "steps")}
    return {**os.environ, **more, "PYTHONPATH": str(copy)}


def steps_of(copies: list[Path]) -> int:
    """How many steps began."""
    return sum(file.stat().st_size for file in (copy.parent / "steps" for copy in copies) if file.exists())


def kill(worker: subprocess.Popen[bytes], whom: str) -> bool:
    """Kill a worker, the cell that it runs, or both; whether the worker has to be started again."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    for number in map(int, children if whom != "worker" else []):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    if whom == "cell":
        return False
    worker.kill()
    worker.wait()
    return True


def trial(folder: Path, kills: int, seeds: int, seed: int) -> None:
    """Raises AssertionError where the tables differ, a lease is left, or more than 5% of the steps were repeated."""
    copies = [folder / f"machine_{number}" / "code" for number in (1, 2)]
    for copy in copies:
        for part in PARTS:
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "counting.py").write_text(COUNTING, encoding="utf-8")
    file, output, serial = folder / "comparison.json", folder / "shared", folder / "serial"
    file.write_text(json.dumps(FILE), encoding="utf-8")
    asked = [str(file), "--seeds", f"0:{seeds}"]
    attnswap(copies[0], "compare", *asked, "--output", str(serial))
    needed = steps_of(copies)
    for copy in copies:
        (copy.parent / "steps").unlink(missing_ok=True)
    plan = folder / "cells.txt"
    plan.write_text(attnswap(copies[0], "compare", *asked, "--output", str(output), "--plan"), encoding="utf-8")
    draw, killed, begun = random.Random(seed), 0, time.monotonic()
    due = sorted(draw.uniform(0.0, 0.9 * needed) for _ in range(kills))

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, str(plan), str(draw.randrange(1 << 30))]
        copy = copies[number]
        return subprocess.Popen(command, cwd=copy.parent, env=environment(copy), start_new_session=True)

    workers = [start(0), start(1)]
    while any(worker.poll() is None for worker in workers):
        time.sleep(0.2)
        if killed == kills or steps_of(copies) < due[killed]:
            continue
        time.sleep(draw.choice([0.0, draw.uniform(0.0, 10.0)]))  # a fit runs now; later perhaps imports or a test
        number = draw.randrange(2)
        if workers[number].poll() is None:
            killed += 1
            if kill(workers[number], draw.choice(["worker", "cell", "both"])):
                workers[number] = start(number)
    assert [worker.returncode for worker in workers] == [0, 0]
    seconds = time.monotonic() - begun
    attnswap(copies[1], "compare", *asked, "--output", str(output))
    same = (output / "results.csv").read_bytes() == (serial / "results.csv").read_bytes()
    left = [path for path in (output / "leases").rglob("*") if path.is_file()]
    repeated = steps_of(copies) / needed - 1
    cells = json.loads((output / "comparison.json").read_text())["cells"]
    resumed = sum(len(cell["runs"]) - 1 for cell in cells)
    print(
        f"{3 * seeds} cells, {killed} kills in {seconds:.0f} s, {resumed} resumptions; tables equal: {same}; "
        f"{repeated:.1%} of {needed} steps repeated; leases left: {len(left)}"
    )
    assert same
    assert repeated <= 0.05
    assert not left


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trial(Path(folder), options.kills, options.seeds, options.seed)


if __name__ == "__main__":
    main()
