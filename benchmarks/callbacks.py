"""What callbacks cost: `python -m benchmarks.callbacks` writes `callbacks`, `attention_monitor` and `stabilizers`.

One thread, process CPU time. A regularizer or monitor of weights is timed inside the training steps that pay for it:
its hooks' time over the rest of the step, medians. Statistics of attention are timed alternately with the attention
pass that they are compared with. Stabilizers act within the forward and backward pass, so that whole steps with and
without them are compared, in runs that take turns. `--tables stabilizers` measures these alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from attention_modules.analysis import STATISTICS, attention_sink, attention_statistics, token_similarity
from benchmarks.common import alternate, peak_memory, write_results
from lightning_tasks.callbacks import (
    AttentionDiversification,
    EntropyRegularizer,
    LocAteR,
    LogitMonitor,
    QKClip,
    SigmaReparam,
    SpectrumMonitor,
)
from lightning_tasks.callbacks.attention_monitor import SINK_ROWS
from lightning_tasks.language_modeling import LanguageModelingTask

VOCABULARY, TOKENS, LM_BATCH, IMAGE_BATCH = 33_278, 64, 64, 16
LONG = (1, 3, 4096, 64)
TABLES = ["attention_monitor", "callbacks", "stabilizers"]


class DeiT(pl.LightningModule):
    """DeiT-tiny as a user would train it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = timm.create_model("deit_tiny_patch16_224", num_classes=1000)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-4)


def language_model() -> tuple[pl.LightningModule, DataLoader]:
    """The one-layer, one-head model of the LocAteR experiment, on random tokens."""
    model = {
        "class_path": "lightning_tasks.models.TransformerLM",
        "init_args": {"num_layers": 1, "dim": 128, "num_heads": 1, "mlp_dim": 128, "num_tokens": TOKENS},
    }
    tokens = torch.randint(VOCABULARY, (LM_BATCH, TOKENS + 1))
    return LanguageModelingTask(model, vocab_size=VOCABULARY), _endless(tokens[:, :-1], tokens[:, 1:])


def deit() -> tuple[pl.LightningModule, DataLoader]:
    """DeiT-tiny on one random batch of images."""
    return DeiT(), _endless(torch.randn(IMAGE_BATCH, 3, 224, 224), torch.randint(1000, (IMAGE_BATCH,)))


def _endless(*tensors: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(*(t.expand(1000, *t.shape) for t in tensors)), batch_size=None)


class StepTimes(pl.Callback):
    """CPU seconds of each training step, and of the hooks of each callback that was given to :meth:`watch`."""

    HOOKS = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.hooks: dict[str, list[float]] = {}

    def watch(self, callback: Any) -> Any:
        """The callback, with the time of its hooks added up."""
        name = type(callback).__name__
        self.hooks[name] = []
        for hook in self.HOOKS:
            if hook in vars(type(callback)):
                setattr(callback, hook, self._timed(getattr(callback, hook), name))
        return callback

    def _timed(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = hook(*args, **kwargs)
            self.hooks[name][-1] += time.process_time() - start
            return result

        return timed

    def on_train_batch_start(self, *args: Any) -> None:
        for spent in self.hooks.values():
            spent.append(0.0)
        self._start = time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(time.process_time() - self._start)


class WholeSteps:
    """Two callbacks, the first and the last of a trainer, and the CPU seconds of the steps between them."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        times = self

        class First(pl.Callback):
            def on_train_batch_start(self, *args: Any) -> None:
                times.start = time.process_time()

        class Last(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                times.steps.append(time.process_time() - times.start)

        self.first, self.last = First(), Last()


STABILIZERS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "none": (list, ""),
    "LogitMonitor, every step": (lambda: [LogitMonitor(every_n_steps=1)], ""),
    "QKClip, no head passes": (lambda: [QKClip(tau=1e4)], "3%"),
    "QKClip, all looked at": (lambda: [QKClip(tau=1e-4)], ""),
    "SigmaReparam": (lambda: [SigmaReparam()], "3%"),
    "EntropyRegularizer, 16 rows": (lambda: [EntropyRegularizer(0.1)], "3%"),
    "EntropyRegularizer, all rows": (lambda: [EntropyRegularizer(0.1, max_rows=None)], ""),
    "AttentionDiversification": (lambda: [AttentionDiversification()], ""),
}


def stabilizers_in_a_step(
    build: Callable[[], tuple[pl.LightningModule, DataLoader]], steps: int, rounds: int
) -> list[dict[str, str]]:
    """Rows of the table: what each stabilizer adds to a model's training step, by runs that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in STABILIZERS}
    warm_up = 2
    for _ in range(rounds):
        for name, (make, _) in STABILIZERS.items():
            torch.manual_seed(0)
            module, loader = build()
            times = WholeSteps()
            trainer = pl.Trainer(
                accelerator="cpu",
                max_steps=steps + warm_up,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[times.first, *make(), times.last],
            )
            trainer.fit(module, loader)
            seconds[name] += times.steps[warm_up:]
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    default = LogitMonitor().every_n_steps
    added = {name: medians[name] - medians["none"] for name in STABILIZERS if name != "none"}
    added[f"LogitMonitor, every {default} steps"] = added["LogitMonitor, every step"] / default
    limits = {name: limit for name, (_, limit) in STABILIZERS.items()} | {f"LogitMonitor, every {default} steps": "3%"}
    return [
        {
            "training step": build.__name__,
            "callback": name,
            "step without": f"{medians['none'] * 1e3:.0f} ms",
            "added to a step": f"{cost * 1e3:.2f} ms",
            "share": f"{cost / medians['none']:.2%}",
            "limit": limits[name],
        }
        for name, cost in added.items()
    ]


def share_of_step(build: Callable[[], tuple[pl.LightningModule, DataLoader]], steps: int) -> list[dict[str, str]]:
    """Rows of the table: what LocAteR and SpectrumMonitor add to a model's training step."""
    torch.manual_seed(0)
    module, loader = build()
    times = StepTimes()
    every_step = SpectrumMonitor(every_n_steps=1)
    callbacks = [times, times.watch(LocAteR(1e-3, gamma=1.0)), times.watch(every_step)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, loader)
    warm_up = 2
    hooks = {name: statistics.median(spent[warm_up:]) for name, spent in times.hooks.items()}
    step = statistics.median(times.steps[warm_up:]) - sum(hooks.values())
    default = SpectrumMonitor().every_n_steps
    spectrum = hooks["SpectrumMonitor"]
    costs = {"LocAteR, every step": hooks["LocAteR"], f"SpectrumMonitor, every {default} steps": spectrum / default}
    return [
        {
            "training step": build.__name__,
            "callback": name,
            "step without": f"{step * 1e3:.0f} ms",
            "callback a step": f"{cost * 1e3:.2f} ms",
            "share": f"{cost / step:.2%}",
            "limit": "2%",
        }
        for name, cost in costs.items()
    ]


def statistics_against_attention(repeats: int) -> list[dict[str, str]]:
    """Rows of the table: what a firing of AttentionMonitor costs a layer, in passes of attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(LONG) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: scaled_dot_product_attention(q, k, v),
        "entropy": lambda: attention_statistics(q, k, statistics=("entropy",)),
        "all four": lambda: attention_statistics(q, k, statistics=STATISTICS),
        "all of a firing": lambda: (
            attention_statistics(q, k, statistics=STATISTICS),
            attention_sink(q, k, max_rows=SINK_ROWS),
            token_similarity(tokens),
        ),
    }
    tokens = q.transpose(1, 2).flatten(2)
    with torch.no_grad():
        seconds = alternate(calls, repeats, cpu_time=True)
        peaks = {name: peak_memory(call) for name, call in calls.items()}
    limits = {"entropy": (1.2, 2.5), "all four": (3.5, 6.0), "all of a firing": (3.5, 6.0)}
    one = peaks["attention"]
    memory = {name: "unknown" if not (one and peak) else f"{peak / one:.2f}x" for name, peak in peaks.items()}
    return [
        {
            "statistics": name,
            "time": f"{seconds[name] / seconds['attention']:.2f}x",
            "time limit": f"{limit[0]}x",
            "peak memory": memory[name],
            "memory limit": f"{limit[1]}x",
        }
        for name, limit in limits.items()
    ]


def main() -> None:
    """Measure and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each model")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each stabilizer, which take turns")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which to measure; all by default")
    parser.add_argument("--repeats", type=int, default=15, help="alternating rounds of each statistic")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m benchmarks.callbacks"
    batch, heads, tokens, dim = LONG
    against = (
        f"A layer of B = {batch}, H = {heads}, N = {tokens:,}, d = {dim}, in passes of scaled_dot_product_attention; "
        "medians of process CPU time, peaks of resident memory."
    )
    models = (language_model, deit)
    tables = {
        "attention_monitor": (
            "A firing of AttentionMonitor",
            lambda: statistics_against_attention(options.repeats),
            against,
        ),
        "callbacks": (
            "LocAteR and SpectrumMonitor within a training step",
            lambda: [row for build in models for row in share_of_step(build, options.steps)],
            "Medians of process CPU time. SpectrumMonitor: a firing, spread over its default interval.",
        ),
        "stabilizers": (
            "Stabilizers within a training step",
            lambda: [row for build in models for row in stabilizers_in_a_step(build, options.steps, options.rounds)],
            "Differences of medians of process CPU time, of runs that take turns.",
        ),
    }
    for name in options.tables:
        title, measure, notes = tables[name]
        print(write_results(name, title, command, measure(), notes).read_text())


if __name__ == "__main__":
    main()
