"""Long training with every monitor: is memory flat, and are files, tensors and hooks as many at the end as before?

``python -m tests.reliability.long_run [--minutes 60]`` trains a small model in this process, all monitors firing every
few steps, and samples itself every ten seconds. It ends with 1 where memory rises faster than the limit after the
warm-up, or anything counted goes on growing.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    LipschitzMonitor,
    LocAteR,
    PursuitMonitor,
    RunSummary,
    SegmentationOverlay,
    SpectrumMonitor,
    SwapAttention,
)

CLASSES, SIDE, PATCH, DIM = 3, 16, 4, 32
# What each monitor logs at every firing of its own.
LOGGED = {
    "AttentionMonitor": "attention/entropy/mean",
    "SpectrumMonitor": "qk_spectrum/scale/mean",
    "LocAteR": "locater/penalty",
    "LipschitzMonitor": "val/lipschitz/layer_00",
    "PursuitMonitor": "val/pursuit/sparsity/layer_01/pass_1",
}


class Patches(pl.LightningModule):
    """A transformer of patches that predicts a mask; its dropout makes every step another one."""

    class_names = tuple(map(str, range(CLASSES)))

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.1, batch_first=True)
        self.embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.ConvTranspose2d(DIM, CLASSES, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        return self.head(self.encoder(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0])
        self.log("val/loss", F.cross_entropy(scores, batch[1]))
        return scores.argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Sample:
    """What this process holds at a time after the start, in seconds."""

    seconds: float
    memory: float  # resident, MiB
    open_files: int
    tensors: int
    hooks: int
    objects: int  # that the garbage collector tracks
    files: int  # in the run's folder


COUNTED = ("open_files", "tensors", "hooks", "objects", "files")


class Sampler(pl.Callback):
    """Samples between two steps, when no monitor has anything open: list it last."""

    def __init__(self, folder: Path, every: float) -> None:
        self.folder, self.every = folder, every
        self.samples: list[Sample] = []
        self._start = self._last = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: object) -> None:
        now = time.monotonic()
        if now - self._last >= self.every:
            self._last = now
            self.samples.append(self._sample(now - self._start, pl_module))

    def _sample(self, seconds: float, module: nn.Module) -> Sample:
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(isinstance(each, Tensor) for each in objects)
        hooks = sum(
            len(getattr(part, name))
            for part in module.modules()
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        )
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        files = sum(path.is_file() and "_step_" not in path.name for path in self.folder.rglob("*"))  # no figures
        count = len(objects) - len(self.samples)  # what this script keeps is no leak
        return Sample(seconds, memory, len(os.listdir("/proc/self/fd")), tensors, hooks, count, files)


class Maps(AttentionMapLogger):
    """Counts its figures, of which there is one for each step."""

    drawn = 0

    def _draw(self, *args: object) -> None:
        super()._draw(*args)  # type: ignore[arg-type]
        self.drawn += 1


def slope(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The line of least squares: its rise an hour, and the standard error of that (of independent residuals)."""
    hours, y = np.asarray(seconds) / 3600, np.asarray(values)
    centered = hours - hours.mean()
    rise = float(centered @ y / (centered @ centered))
    residuals = y - y.mean() - rise * centered
    return rise, float(np.sqrt(residuals @ residuals / max(len(y) - 2, 1) / (centered @ centered)))


def growing(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """What is counted higher throughout the last third than ever in the first: the numbers of both."""
    third = max(len(samples) // 3, 1)
    found = {}
    for name in COUNTED:
        before, after = (max(getattr(each, name) for each in part) for part in (samples[:third], samples[-third:]))
        lowest_after = min(getattr(each, name) for each in samples[-third:])
        if lowest_after > before:
            found[name] = [before, after]
    return found


def train(folder: Path, minutes: float, every: float) -> tuple[list[Sample], dict[str, int]]:
    """Train for so long; the samples, and how often each monitor fired."""
    pl.seed_everything(0, verbose=False)
    images = torch.randn(64, 3, SIDE, SIDE)
    loader = DataLoader(TensorDataset(images, images.argmax(1)), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(images, images.argmax(1)), batch_size=16)
    sampler, maps = Sampler(folder, every), Maps(every_n_epochs=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_time={"seconds": int(60 * minutes)},
        logger=CSVLogger(folder, name="", version="", flush_logs_every_n_steps=20),
        log_every_n_steps=5,
        limit_val_batches=2,
        check_val_every_n_epoch=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            SwapAttention("rpc", {"iterations": 2}, layers=[1]),
            AttentionMonitor(every_n_steps=3),
            SpectrumMonitor(every_n_steps=5, heads=True),
            LipschitzMonitor(max_iter=4),
            PursuitMonitor(),
            LocAteR(0.01, gamma=0.1, observe_only=True),
            maps,
            SegmentationOverlay(every_n_epochs=10),
            RunSummary("val/loss"),
            sampler,
        ],
    )
    trainer.fit(Patches(), loader, held_out)
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    fired = {name: sum(bool(row[column]) for row in rows) for name, column in LOGGED.items()}
    return sampler.samples, {"steps": trainer.global_step, **fired, "AttentionMapLogger": maps.drawn}


def main(args: Sequence[str] | None = None) -> int:
    """Run, print, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm_up", type=float, help="minutes that are left out; a quarter, at most 10")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one sample to the next")
    parser.add_argument("--limit", type=float, default=16.0, help="the steepest rise of memory, MiB an hour")
    parser.add_argument("--output", type=Path, help="a file for the samples, one JSON object a line")
    given = parser.parse_args(args)
    warm_up = min(given.minutes / 4, 10.0) if given.warm_up is None else given.warm_up
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples, fired = train(Path(folder), given.minutes, given.every)
    if given.output is not None:
        given.output.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in samples))
    kept = [each for each in samples if each.seconds >= 60 * warm_up]
    if len(kept) < 6:
        print(f"{len(kept)} samples after {warm_up:g} minutes of warm-up are too few: train longer", file=sys.stderr)
        return 2
    rise, error = slope([each.seconds for each in kept], [each.memory for each in kept])
    grown = growing(kept)
    print(", ".join(f"{name}: {count:,}" for name, count in fired.items()))
    print(f"{len(kept)} samples after {warm_up:g} of {given.minutes:g} minutes; the first and the last:")
    for each in (kept[0], kept[-1]):
        print(f"  {each}")
    print(f"resident memory rises by {rise:.1f} MiB an hour, standard error {error:.1f}, limit {given.limit:g}")
    print(f"went on growing: {grown or 'nothing'}")
    return int(rise > given.limit or bool(grown))


if __name__ == "__main__":
    sys.exit(main())
