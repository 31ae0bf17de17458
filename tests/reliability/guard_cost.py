"""The share of a training step that NonFiniteGuard takes: python -m tests.reliability.guard_cost fit --config RECIPE.

The arguments are those of `attnswap`; the recipe has the guard. Prints the medians after ten steps.
"""

import statistics
import sys
import time

import torch
from lightning.pytorch import Callback

from lightning_tasks.callbacks import NonFiniteGuard
from lightning_tasks.cli.fit import run

HOOKS = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")


class Clock(Callback):
    """The seconds of each step, and of the guard within it."""

    def __init__(self):
        self.guard, self.steps, self.shares = 0.0, [], []
        for name in HOOKS:
            setattr(NonFiniteGuard, name, self.timed(getattr(NonFiniteGuard, name)))

    def timed(self, hook):
        def wrapped(*args, **kwargs):
            started = time.perf_counter()
            hook(*args, **kwargs)
            self.guard += time.perf_counter() - started

        return wrapped

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.started, self.guard = time.perf_counter(), 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(time.perf_counter() - self.started)
        self.shares.append(self.guard)


if __name__ == "__main__":
    torch.set_num_threads(1)
    clock = Clock()
    run(sys.argv[1:], callbacks=[clock])
    step, guard = (1e3 * statistics.median(values[10:]) for values in (clock.steps, clock.shares))
    print(f"a step {step:.2f} ms, of which the guard {guard:.2f} ms: {100 * guard / step:.2f}%")
