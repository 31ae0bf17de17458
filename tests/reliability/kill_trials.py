"""Runs that are killed at a random moment and resumed by `--ckpt_path last` end as one that was not.

python -m tests.reliability.kill_trials [--kind language|stabilizers|images|masks] [--trials 20] [--seed 0]

Weights, the optimizer's state and all that a run logs after its checkpoint are compared bitwise, with a validation that
was due at its step. Runs are forked from a process that has imported everything; every fifth resumed one is a new
process.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lightning_tasks.twins import twin

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = {
    "class_path": "ModelCheckpoint",
    "init_args": {"every_n_train_steps": 1, "save_last": True, "save_top_k": 1},
}
SWAP = {"class_path": "lightning_tasks.callbacks.SwapAttention", "init_args": {"mechanism": "rpc", "layers": [0]}}
OF_FIRST, OF_SECOND = {"layers": [0]}, {"layers": [1]}
STABILIZERS = [
    {"class_path": f"lightning_tasks.callbacks.{name}", "init_args": options}
    for name, options in {
        "SigmaReparam": OF_SECOND,
        "QKClip": {"tau": 0.05, **OF_FIRST},
        "EntropyRegularizer": {"weight": 1.0, "floor": 0.95},
        "AttentionDiversification": {"weight": 1.0, "threshold": 1.0},
        "LogitMonitor": {"every_n_steps": 1},
    }.items()
]
COMMON = [
    "--trainer.max_epochs=-1",
    "--trainer.max_steps=14",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.limit_val_batches=2",
    "--trainer.check_val_every_n_epoch=null",
    "--trainer.val_check_interval=3",
]
KINDS = {
    "language": (
        "quickstart/language_modeling",
        [
            "--model.model.init_args.dropout=0.2",
            "--trainer.limit_train_batches=5",
            f"--trainer.callbacks={json.dumps([SWAP, CHECKPOINTS])}",
        ],
    ),
    "stabilizers": (
        "quickstart/language_modeling",
        [
            "--trainer.limit_train_batches=5",
            f"--trainer.callbacks={json.dumps([*STABILIZERS, CHECKPOINTS])}",
        ],
    ),
    "images": (
        "quickstart/classification",
        ["--data.batch_size=250", "--data.train_transform.hflip=0.5", f"--trainer.callbacks={json.dumps(CHECKPOINTS)}"],
    ),
    "masks": ("quickstart/segmentation", [f"--trainer.callbacks={json.dumps(CHECKPOINTS)}"]),
}
FRESH = 5  # every so many trials a new process resumes


def command(kind: str, folder: Path) -> list[str]:
    """The arguments of a run, whose recipe is written below `folder`."""
    recipe, further = KINDS[kind]
    return ["fit", "--config", twin(recipe, folder), *COMMON, *further]


def forked(folder: Path, arguments: list[str]) -> int:
    """Start the command in a fork of this process, in a folder; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["attnswap"]
        from lightning_tasks.__main__ import main

        try:
            main(arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
    finally:
        os._exit(code)


def run(folder: Path, arguments: list[str], fresh: bool = False) -> None:
    """Run the command to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        with (folder / "log.txt").open("a") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            words = [sys.executable, "-W", "ignore", "-m", "lightning_tasks", *arguments]
            code = subprocess.run(words, cwd=folder, stdout=log, stderr=log, env=environment).returncode
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(forked(folder, arguments), 0)[1])
    if code:
        raise RuntimeError(f"exit code {code}: {(folder / 'log.txt').read_text()[-2000:]}")


def kill(folder: Path, arguments: list[str], source: random.Random, seconds: float) -> bool:
    """Start the command, kill it at a random moment of the `seconds` after its first checkpoint; False: it was done."""
    folder.mkdir(parents=True)
    child = forked(folder, arguments)
    while not list(folder.rglob("*.ckpt")):
        if os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError((folder / "log.txt").read_text()[-2000:])
        time.sleep(0.002)
    time.sleep(source.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def logged(folder: Path) -> dict[tuple[int, str], str]:
    """What the newest run in a folder logged: text by step and metric."""
    table = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(int(row["step"]), name): value for row in rows for name, value in row.items() if name != "step" and value}


def final(folder: Path) -> dict[str, Any]:
    """The newest checkpoint in a folder; a run that was killed behind its last step has no more to do."""
    import torch

    newest = max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)


def differences(whole: Path, resumed: Path, first: int) -> list[str]:
    """What is not bitwise equal at the end of two runs, and in what they log from step `first` on.

    The values of a validation due at that step are logged one lower.
    """
    one, other = final(whole), final(resumed)
    parts = ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers")
    unlike = [part for part in parts if not _equal(one[part], other[part])]
    before, after = (
        {key: value for key, value in logged(each).items() if key[0] >= first - ("val/" in key[1])}
        for each in (whole, resumed)
    )
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            unlike.append(f"{key[1]} at step {key[0]}: {before.get(key)} and {after.get(key)}")
    return unlike


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def trials(kind: str, count: int, seed: int, folder: Path) -> list[str]:
    """Run `count` trials; a line for each that did not end as the uninterrupted run."""
    import torch

    whole, arguments, source, failed, killed_in_write = (
        folder / "whole",
        command(kind, folder / "twins"),
        random.Random(seed),
        [],
        0,
    )
    run(whole, arguments)
    started = time.monotonic()
    run(folder / "timed", arguments)
    seconds = 0.5 * (time.monotonic() - started)
    if unlike := differences(whole, folder / "timed", 0):
        return [f"{kind}: two uninterrupted runs differ: {unlike}"]
    for number in range(count):
        place, attempt = folder / f"trial_{number}", 0
        while not kill(place / f"killed_{attempt}", arguments, source, seconds):
            attempt += 1  # it was done before
        killed = place / f"killed_{attempt}"
        killed_in_write += bool(list(killed.rglob("*.partial")))
        run(killed, [*arguments, "--ckpt_path=last"], fresh=number % FRESH == FRESH - 1)
        taken = next(line for line in (killed / "log.txt").read_text().splitlines() if "--ckpt_path last is" in line)
        step = torch.load(killed / taken.split(" is ")[-1].strip(), weights_only=True)["global_step"]
        unlike = differences(whole, killed, step)
        print(f"{kind} {number}: resumed at step {step}: {'; '.join(unlike) or 'bitwise equal'}", flush=True)
        failed += [f"{kind} {number}: {'; '.join(unlike)}"] if unlike else []
    print(
        f"{kind}: {count - len(failed)} of {count} bitwise equal; {killed_in_write} killed within a write", flush=True
    )
    return failed


def main() -> None:
    """Run the trials of one kind, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import lightning_tasks.cli.fit  # noqa: F401  what a fork need not import again

    failed = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTNSWAP_CACHE"] = str(Path(folder, "cache"))
        for kind in options.kind or KINDS:
            failed += trials(kind, options.trials, options.seed, Path(folder, kind))
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
