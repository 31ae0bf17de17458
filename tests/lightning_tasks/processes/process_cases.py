"""Many small runs in turn, which a test starts on several processes and makes itself on one: FOLDER DEVICES."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from attnswap.datamodules import DigitScenesDataModule, TokenSelectionDataModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tasks import ImageClassificationTask, LanguageModelingTask, SegmentationTask, TokenSelectionTask
from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    FreezeQK,
    LipschitzMonitor,
    LocAteR,
    NonFiniteGuard,
    PredictionTable,
    PursuitMonitor,
    QKWeightDecay,
    RobustnessEvaluation,
    RunSummary,
    SaveOnStop,
    SegmentationOverlay,
    SpectrumMonitor,
    SwapAttention,
)
from tests.lightning_tasks.callbacks.modules import TinyLM, batches
from tests.lightning_tasks.language_data import SMALL, RandomText

# Not Adam: the gradient of a key bias is zero but for rounding, which Adam would scale to whole steps.
SGD = {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
TINY = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 8, "depth": 1, "num_heads": 2}
SEGMENTER = {
    "backbone": "deit_tiny_patch16_224",
    "img_size": 32,
    "backbone_options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
}
STALL = timedelta(seconds=60)  # what waits so long for another process fails
KINDS = ("images", "text", "masks", "selection")


class RandomImages(pl.LightningDataModule):
    """Images of noise, in a plain loader, in which Lightning puts a sampler that repeats some for equal shares."""

    num_classes = 7

    def __init__(self, batch_size: int, num_train: int, num_val: int):
        super().__init__()
        self.batch_size, self.counts = batch_size, {"train": num_train, "val": num_val, "test": num_val}

    def _loader(self, split: str, seed: int) -> DataLoader:
        generator, count = torch.Generator().manual_seed(seed), self.counts[split]
        images = torch.rand(count, 1, 8, 8, generator=generator)
        labels = torch.randint(0, self.num_classes, (count,), generator=generator)
        return DataLoader(TensorDataset(images, labels), batch_size=self.batch_size)

    def train_dataloader(self):
        return self._loader("train", 0)

    def val_dataloader(self):
        return self._loader("val", 1)

    def test_dataloader(self):
        return self._loader("test", 2)

    predict_dataloader = test_dataloader


class Share(IterableDataset):
    """This process's share of a few items, by which processes have different numbers of batches, or none."""

    def __init__(self, items: list[Any], module: pl.LightningModule):
        self.items, self.module = items, module

    def __iter__(self):
        run = self.module.trainer
        return iter(self.items[run.global_rank :: run.world_size])


def task_and_data(kind: str, batch_size: int, num_train: int, num_val: int) -> tuple[Any, Any]:
    """A task of random weights, the same in every process, and its data."""
    pl.seed_everything(3, verbose=False)
    if kind == "images":
        task = ImageClassificationTask("vit_tiny_patch16_224", model_options=TINY, mechanism="rpc", optimizer=SGD)
        return task, RandomImages(batch_size, num_train, num_val)
    if kind == "text":
        return LanguageModelingTask(SMALL, optimizer=SGD), RandomText(batch_size, num_train, num_val)
    if kind == "masks":
        task = SegmentationTask(SEGMENTER, mechanism="rpc", optimizer=SGD)
        sizes = {"num_train": num_train, "num_val": num_val, "num_test": num_val}
        plain = {"photometric": 0.0}
        return task, DigitScenesDataModule(batch_size=batch_size, img_size=32, train_transform=plain, **sizes)
    steps = 2 * num_train * 4 // batch_size  # of all processes, each of which sees all inputs in a step
    return TokenSelectionTask(optimizer=SGD), TokenSelectionDataModule("joint", steps_per_epoch=steps)


class Runs:
    """Trainers on so many processes, and what they logged."""

    def __init__(self, folder: Path, devices: int, **options: Any):
        self.folder, self.devices, self.options = folder, devices, options
        self.processes = devices * options.get("num_nodes", 1)

    def trainer(self, callbacks: list[Any] = [], name: str = "", **options: Any) -> pl.Trainer:  # noqa: B006
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        logger = CSVLogger(self.folder, name=name, version="run") if name else False
        # Not the default: a forward pass would broadcast buffers, and wait where another process has no batch.
        ddp = DDPStrategy(timeout=STALL, broadcast_buffers=False)
        strategy = ddp if self.processes > 1 else "auto"
        given = {"accelerator": "cpu", "devices": self.devices, "strategy": strategy, "log_every_n_steps": 1}
        given |= {"default_root_dir": self.folder, "logger": logger, "max_epochs": 2, **quiet}
        return pl.Trainer(callbacks=list(callbacks), **{**given, **self.options, **options})

    def task(self, kind: str, num_train: int, num_val: int, callbacks: list[Any] = [], name: str = "") -> dict:  # noqa: B006
        """Fit and test; what was logged, and the weights."""
        task, data = task_and_data(kind, 4 // self.processes, num_train, num_val)
        run = self.trainer(callbacks, name)
        run.fit(task, data)
        logged = numbers(run)
        run.test(task, data, verbose=False)
        return {"logged": {**logged, **numbers(run)}, "weights": dict(task.model.named_parameters())}

    def module(self, callbacks: list[Any], items: int | None = None) -> dict:
        """As :meth:`task`, of a module that knows nothing of us; with ``items``, of so many batches for all."""
        module = TinyLM()
        loader = batches(1, 1) if items is None else DataLoader(Share(list(batches(items, 1)), module), batch_size=None)
        run = self.trainer(callbacks, num_sanity_val_steps=1)
        run.fit(module, batches(self.devices, 4 // self.devices), loader)
        return {"logged": numbers(run), "weights": dict(module.named_parameters())}

    def refused(self) -> str:
        """What is said of the robustness table."""
        try:
            self.trainer([RobustnessEvaluation()]).test(*task_and_data("images", 1, 1, 1), verbose=False)
        except ValueError as error:
            return str(error)
        return ""


def numbers(run: pl.Trainer) -> dict[str, float]:
    """What a trainer logged."""
    return {name: float(value) for name, value in run.callback_metrics.items()}


def monitors() -> list[Any]:
    """Those that fit any module with softmax attention."""
    every = {"every_n_steps": 1}
    shown = [
        SpectrumMonitor(**every, heads=True),
        LipschitzMonitor(max_iter=8, tol=0.5),
        AttentionMapLogger(rollout=True),
    ]
    return [AttentionMonitor(**every, stages=("train", "validation", "test")), *shown]


@mock.patch.object(Figure, "savefig", new=mock.Mock(return_value=None))  # half the time, and ddp_run.py writes some
def main(folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    runs = Runs(folder, devices, **options)
    found: dict[str, Any] = {}
    for kind in KINDS:
        watching = [AttentionMonitor(stages=("validation", "test"))] if kind != "selection" else []
        found[f"{kind}, three"] = runs.task(kind, 4, 3, watching)
    callbacks_of = {
        "images": [*monitors()[:1], PursuitMonitor(), AttentionMapLogger(), RunSummary("val/loss")],
        "text": [*monitors(), LocAteR(0.1), NonFiniteGuard(), SaveOnStop(), RunSummary()],
        "masks": [*monitors()[:1], PursuitMonitor(), SegmentationOverlay()],
        "selection": [RunSummary("val/loss")],
    }
    for kind, callbacks in callbacks_of.items():
        found[f"{kind}, one"] = runs.task(kind, 1, 1, callbacks, name=kind)
        if kind != "selection":  # Lightning refuses to predict fewer batches than processes, and it has one
            runs.trainer([PredictionTable()], name=f"{kind}_predicted").predict(*task_and_data(kind, 1, 1, 3))
    swap = SwapAttention("scaled", {"variant": "scalar"}, layers=[0])
    found["module, one"] = runs.module([swap, *monitors(), LocAteR(0.1, layers=[0]), QKWeightDecay(0.1)])
    found["module, frozen"] = runs.module([FreezeQK(layers=[1]), *monitors()[:1]])
    for items in (1, 3):
        rpc = SwapAttention("rpc", layers=[0])
        found[f"module, {items} batches"] = runs.module(
            [rpc, *monitors()[:1], *monitors()[2:], PursuitMonitor()], items
        )
    if devices > 1:
        found["refused"] = runs.refused()
    return found


def tasks(folder: Path, devices: int, **options: Any) -> dict[str, Any]:
    """A few runs, for more processes."""
    torch.set_num_threads(1)
    runs = Runs(folder, devices, **options)
    monitor = {"stages": ("validation", "test")}
    return {kind: runs.task(kind, 4, 3, [AttentionMonitor(**monitor), NonFiniteGuard()]) for kind in ("images", "text")}


if __name__ == "__main__":
    nodes = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    run = tasks if nodes else main
    result = run(Path(sys.argv[1]), int(sys.argv[2]), **({"num_nodes": nodes} if nodes else {}))
    rank = torch.distributed.get_rank()
    torch.save(result, Path(sys.argv[1]) / f"result_{rank}.pt")
