"""What the variants of a comparison cost a training step.

`python -m benchmarks.training_step rpc/compare_classification` fits every variant for a few steps, in turn and round
after round in one process of one thread, and writes `training_step_NAME` under results: CPU time and peak of resident
memory of a step (forward, backward, optimizer, and the callbacks that the comparison has), and trained parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.common import ResidentPeak, write_results
from lightning_tasks.cli.fit import run
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.recipes.variants import full_name, read_variants

WARM_UP, TIMED, WEIGHED = 3, 12, 3


class StepCosts(pl.Callback):
    """CPU seconds of some steps, and the peaks of resident memory (MiB) of those that follow."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peaks: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step >= WARM_UP + TIMED:
            self._peak = ResidentPeak()
        self._start = time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step > WARM_UP + TIMED:
            self.peaks.append(self._peak.rise())
        elif trainer.global_step > WARM_UP:
            self.seconds.append(time.process_time() - self._start)


def measure(name: str, rounds: int) -> list[dict[str, str]]:
    """A row per variant: parameters, milliseconds per step, their ratio to the first variant's, and MiB."""
    seconds, peaks, parameters = defaultdict(list), defaultdict(list), {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for cell in plan_cells(read_variants(name), [0], folder):
                costs = StepCosts()
                steps = WARM_UP + TIMED + WEIGHED
                limits = [f"--trainer.max_steps={steps}", "--trainer.limit_val_batches=0"]
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    cli = run([*cell.arguments, *limits, f"--trainer.default_root_dir={folder}"], callbacks=[costs])
                parameters[cell.name] = sum(each.numel() for each in cli.model.parameters() if each.requires_grad)
                seconds[cell.name].append(statistics.median(costs.seconds))
                peaks[cell.name].append(statistics.median(costs.peaks))
    times = {variant: statistics.median(taken) for variant, taken in seconds.items()}
    first = next(iter(times.values()))
    return [
        {
            "variant": variant,
            "parameters": str(parameters[variant]),
            "CPU time per step": f"{taken * 1e3:.0f} ms",
            "to the first": f"{taken / first:.2f}",
            "peak memory of a step": f"{statistics.median(peaks[variant]):.0f} MiB",
        }
        for variant, taken in times.items()
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", help="a recipe that compares, such as rpc/compare_classification")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each variant (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.comparison, options.rounds)
    command = f"python -m benchmarks.training_step {options.comparison} --rounds {options.rounds}"
    slug = full_name(options.comparison).replace("/", "_")
    print(write_results(f"training_step_{slug}", f"A training step of {options.comparison}", command, rows).read_text())


if __name__ == "__main__":
    main()
