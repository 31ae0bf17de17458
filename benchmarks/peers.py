"""A training step of our tasks beside what a user would take in their place.

Run from the repository's root: ``python -m benchmarks.peers``. Ours runs under Lightning's Trainer; the peer's step, on
the same batch, is taken in turn with ours in the same process, each time that Lightning asks for the next batch. The
peers come from PyPI: ``pip install 'attnswap[hf,mmseg]'`` and ``pip install --no-deps litgpt==0.5.13`` (it pins older
versions of two packages, which its models do not need). A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import write_results
from benchmarks.contests import DIM, HEADS, MMSEG_CONFIG, Batch, Contest, Images, Text
from lightning_tasks.compare.workers import start_context

WARM_UP = 1

SMALL, LARGE = Text(2, 64, 4_000, 32), Text(16, 256, 33_278, 8)
CLASSIFIED, MASKED = Images(224, 16), Images(512, 2)


def contests() -> dict[str, Contest]:
    """All, by the name that `--only` takes."""
    found = {}
    for key, shape, rounds, goal in (("small", SMALL, 30, 1.3), ("large", LARGE, 4, 2.0)):
        for peer, task in (
            ("litgpt", partial(shape.task, positions="sinusoidal")),
            ("gpt2", partial(shape.task, tied=True)),
        ):
            name = f"language model, {shape}; {'litgpt GPT' if peer == 'litgpt' else 'transformers GPT-2'}"
            found[f"{peer}_{key}"] = Contest(name, task, getattr(shape, peer), shape.batch, rounds, goal)
    words = f"DeiT-tiny, {CLASSIFIED.size} pixels, batch {CLASSIFIED.count}; timm, bare loop"
    found["timm"] = Contest(words, CLASSIFIED.classification, CLASSIFIED.timm, CLASSIFIED.classified, 7, 1.1)
    words = f"Segmenter ViT-T, {MASKED.size} pixels, batch {MASKED.count}; mmsegmentation"
    found["mmseg"] = Contest(words, MASKED.segmentation, MASKED.mmsegmentation, MASKED.masked, 5, 1.2)
    return found


@dataclass(frozen=True)
class Setting:
    """Where and how both train.

    Args:
        accelerator: "cpu" or "cuda".
        bf16: autocast to bfloat16.
        compiled: `torch.compile` of both models.
    """

    accelerator: str = "cpu"
    bf16: bool = False
    compiled: bool = False

    def prepare(self, model: nn.Module) -> None:
        """Put what was asked for onto a peer's model; Lightning does so with ours."""
        forward: Any = torch.compile(model.forward) if self.compiled else model.forward
        model.forward = torch.autocast(self.accelerator, torch.bfloat16, enabled=self.bf16)(forward)  # type: ignore[method-assign]

    def clocks(self) -> tuple[float, float]:
        """Wall-clock and CPU time, when the device is done."""
        if self.accelerator == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


class CompileModel(pl.Callback):
    """Compiles what our task's training step calls of its model."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = pl_module.model
        if hasattr(model, "hidden"):  # a language model, whose head is within the loss
            model.hidden = torch.compile(model.hidden)
        else:
            model.compile()


class Turns(Dataset[Batch]):
    """One batch again and again; the peer takes its step whenever it is asked for, and both are timed.

    Ours is all that happens from here to the next batch: the step, its hooks, its logging, the progress bar.
    """

    def __init__(
        self, batch: Batch, peer: Callable[[], object], rounds: int, clocks: Callable[[], tuple[float, float]]
    ) -> None:
        self.batch, self.peer, self.rounds, self._clocks = batch, peer, WARM_UP + rounds, clocks
        self.ours: list[tuple[float, float]] = []
        self.theirs: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self.rounds + 1  # the last one only ends our last step

    def __getitem__(self, index: int) -> Batch:
        if index:
            self.ours.append(self._since_start())
        if index < self.rounds:
            self._start = self._clocks()
            self.peer()
            self.theirs.append(self._since_start())
        self._start = self._clocks()
        return self.batch

    def _since_start(self) -> tuple[float, float]:
        return tuple(now - before for now, before in zip(self._clocks(), self._start, strict=True))  # type: ignore[return-value]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield


def take_turns(contest: Contest, rounds: int, setting: Setting) -> tuple[Turns, pl.LightningModule, nn.Module]:
    """Train ours and the peer's in turn, each step timed.

    Raises:
        ModuleNotFoundError: if the peer is not installed.
    """
    torch.manual_seed(0)
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        with torch.device(setting.accelerator):
            batch = contest.batch()
            model, step = contest.peer(batch)
        setting.prepare(model)
        turns = Turns(batch, step, rounds, setting.clocks)
        task = contest.task()
        trainer = pl.Trainer(
            accelerator=setting.accelerator,
            devices=1,
            precision="bf16-mixed" if setting.bf16 else "32-true",
            callbacks=[CompileModel()] if setting.compiled else [],
            max_epochs=1,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(task, DataLoader(turns, batch_size=None))
    return turns, task, model


def measure(contest: Contest, threads: int, rounds: int | None = None) -> dict[str, str]:
    """A row of the table.

    Raises:
        ModuleNotFoundError: if the peer is not installed.
    """
    torch.set_num_threads(threads)
    turns, task, model = take_turns(contest, rounds or contest.rounds, Setting())
    ours, theirs = turns.ours[WARM_UP:], turns.theirs[WARM_UP:]
    wall, cpu = ([b[clock] / a[clock] for a, b in zip(ours, theirs, strict=False)] for clock in (0, 1))
    low, middle, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else wall * 3
    return {
        "compared": contest.name,
        "parameters, ours": f"{_parameters(task):,}",
        "parameters, theirs": f"{_parameters(model):,}",
        "ours, ms": f"{1e3 * statistics.median(each[0] for each in ours):.0f}",
        "theirs, ms": f"{1e3 * statistics.median(each[0] for each in theirs):.0f}",
        "theirs / ours": f"{middle:.2f}",
        "quartiles": f"{low:.2f} to {high:.2f}",
        "of CPU time": f"{statistics.median(cpu):.2f}",
        "goal": f"{contest.goal:g}",
        "rounds": str(len(wall)),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


NOTES = f"""\
Medians of wall-clock time of a training step (forward, loss, backward, update), ours and the peer's in turn in one
process, on the same batch in float32, without gradient clipping; "theirs / ours" is the median of the ratios of
neighboring steps (above 1: ours is faster), beside their quartiles, and "of CPU time" the median ratio of the
process' CPU time. The first round does not count. Load: the machine's mean load of the last minute at the
end of a row.

- Each row is measured in a new process: after large tensors were freed, forms that allocate much become faster.
- Ours is a task under Lightning's Trainer with its progress bar and CSVLogger; its step is all that happens between
  two batches. The peers' steps are bare: they log nothing.
- Language models: width {DIM}, {HEADS} heads, MLP of {4 * DIM}, no dropout, fused AdamW. litgpt's GPT takes the
  step of its `pretrain` (its loss in chunks of 128 tokens), with untied embeddings and rotary positions off; it has
  GELU, ours ReLU and sinusoidal positions. transformers' GPT-2 has ReLU and tied embeddings and learned positions
  as ours, SDPA attention, and its own loss.
- DeiT-tiny: the same timm model, mixup 0.8, cutmix 1, label smoothing 0.1, drop path 0.1, fused AdamW and timm's
  groups of parameters in both. The bare loop gets images that are normalized, and measures no accuracy; ours does
  both.
- Segmenter: `{MMSEG_CONFIG}` in mmsegmentation's own `train_step` against SegmentationTask, drop path 0.1, SGD with
  momentum. Its data preprocessor normalizes bytes, its head logs the accuracy a pixel."""


def main(args: list[str] | None = None) -> None:
    """Measure, print and write ``benchmarks/results/peers.md`` and ``.csv``."""
    known = contests()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=known, default=list(known), help="which ones (default: all)")
    parser.add_argument("--rounds", type=int, help="timed steps of each (default: by comparison)")
    parser.add_argument("--print_only", action="store_true", help="write no file")
    options = parser.parse_args(args)
    command = " ".join(["python -m benchmarks.peers", *(sys.argv[1:] if args is None else args)])
    rows = []
    # A row is measured in a new process: large tensors that an earlier row freed change what malloc does.
    with ProcessPoolExecutor(1, mp_context=start_context(), max_tasks_per_child=1) as processes:
        for name in options.only:
            try:
                rows.append(processes.submit(measure, known[name], options.threads, options.rounds).result())
            except ModuleNotFoundError as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            print(rows[-1], flush=True)
            if not options.print_only:  # after each row, as all take long
                write_results("peers", "A training step beside its peers", command, rows, NOTES)


if __name__ == "__main__":
    main()
