"""Runs with Lightning's ModelParallelStrategy (FSDP2), which a test starts on two processes: FOLDER DEVICES."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from attention_modules import swap_attention
from lightning_tasks.callbacks import (
    AttentionMapLogger,
    AttentionMonitor,
    FreezeQK,
    LipschitzMonitor,
    LocAteR,
    PursuitMonitor,
    QKWeightDecay,
    SpectrumMonitor,
    SwapAttention,
    swap_now,
)
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, network
from tests.lightning_tasks.processes.process_cases import task_and_data

STALL = timedelta(seconds=60)


class Sharded(TinyLM):
    """Builds, and where there is a mesh shards, in ``configure_model``."""

    def __init__(self, lr: float = 0.1, fused: bool = False):
        super().__init__(lr, fused)
        del self.net

    def swap(self) -> None:
        swap_now(self)

    def configure_model(self):
        if hasattr(self, "net"):
            return
        self.net = network()
        self.swap()
        if self._device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.net["encoder"].layers, *self.net.values()):
                fully_shard(part, mesh=mesh)


class SwapsByItself(Sharded):
    def swap(self) -> None:
        swap_attention(self.net, "rpc", layers=[0])


class NeverAsks(Sharded):
    def swap(self) -> None:
        """Leaves it to the callbacks, which come when it has sharded itself."""


def fit(kind: type[Sharded], callbacks: list[Any], devices: int) -> dict[str, Any]:
    """What was logged and the whole weights, or the error."""
    strategy: Any = "auto"
    if devices > 1:
        strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1, timeout=STALL)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": 4, **quiet}
    run, module = pl.Trainer(callbacks=callbacks, **given), kind()
    try:
        # One step an epoch, as Lightning's sampler shuffles what it hands out to several processes.
        run.fit(module, batches(devices, 8 // devices), batches(2 * devices, 2 // devices))
    except ValueError as error:
        return {"error": str(error)}
    weights = {name: whole(weight) for name, weight in module.named_parameters()}
    return {"logged": {name: float(value) for name, value in run.callback_metrics.items()}, "weights": weights}


def task_of(kind: str, devices: int) -> tuple[Any, Any]:
    """A task of ours, of text in float64 and without chunks of the loss, and data of one step an epoch."""
    task, data = task_and_data(kind, 4 // devices, 4, 4)
    if kind == "text":
        build = task.build_model
        task.build_model = lambda: build().double()
        task.hparams["chunk_size"] = None
    return task, data


def trainer_of(kind: str, strategy: Any, **given: Any) -> pl.Trainer:
    swap = [SwapAttention("rpc", layers=[0])] if kind == "text" else []
    watch = [LocAteR(0.05), AttentionMonitor(every_n_steps=1), SpectrumMonitor(every_n_steps=1)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=[*swap, *watch], strategy=strategy, accelerator="cpu", max_epochs=3, **given, **quiet)


def fit_task(kind: str, folder: Path, devices: int) -> dict[str, Any]:
    """A task that shards itself: its losses and its whole weights; its checkpoint is written into a folder."""
    strategy: Any = ModelParallelStrategy(devices, 1, timeout=STALL) if devices > 1 else "auto"
    (task, data), run = task_of(kind, devices), trainer_of(kind, strategy, devices=devices)
    run.fit(task, data)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    if devices > 1:
        run.save_checkpoint(folder / f"{kind}.ckpt")
    weights = {name: whole(weight) for name, weight in task.named_parameters()}
    sharded = [name for name, weight in task.named_parameters() if hasattr(weight, "full_tensor")]
    return {"logged": logged, "weights": weights, "sharded": sharded}


def loaded(kind: str, folder: Path) -> dict[str, Any]:
    """The same from the checkpoint of two processes on one, and how many steps a fit counts that goes on there."""
    run, (task, data) = trainer_of(kind, ModelParallelStrategy(1, 1), devices=1), task_of(kind, 1)
    given = {"ckpt_path": folder / f"{kind}.ckpt", "weights_only": False}
    run.validate(task, data, verbose=False, **given)
    found = {"loss": float(run.callback_metrics["val/loss"]), "weights": {}}
    found["weights"] = {name: whole(weight) for name, weight in task.named_parameters()}
    again, (task, data) = trainer_of(kind, ModelParallelStrategy(1, 1), devices=1), task_of(kind, 1)
    again.fit_loop.max_epochs = 5
    again.fit(task, data, **given)
    return {**found, "steps": again.global_step}


def selection_error() -> str:
    """What a task says whose model has no blocks."""
    run = pl.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(2, 1, timeout=STALL), logger=False)
    try:
        run.validate(*task_and_data("selection", 1, 1, 1), verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def callbacks() -> list[Any]:
    every = {"every_n_steps": 1}
    shown = [AttentionMonitor(**every), PursuitMonitor(), AttentionMapLogger()]
    return [LocAteR(0.05, layers=[1]), SpectrumMonitor(**every), *shown]


def main(devices: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {
        "before": fit(Sharded, [SwapAttention("rpc", layers=[0]), *callbacks()], devices),
        "own": fit(SwapsByItself, callbacks(), devices),
        "watched": fit(NeverAsks, [AttentionMonitor(every_n_steps=1), SpectrumMonitor(every_n_steps=1)], devices),
        "decayed": fit(NeverAsks, [QKWeightDecay(0.1), LocAteR(0.05)], devices),
        "frozen": fit(NeverAsks, [FreezeQK(layers=[1])], devices),
    }
    found |= {kind: fit_task(kind, folder, devices) for kind in ("images", "text", "masks")}
    if devices > 1:
        found["no blocks"] = {"error": selection_error()}
        found["lipschitz"] = fit(NeverAsks, [LipschitzMonitor()], devices)
        found["late"] = fit(NeverAsks, [SwapAttention("rpc", layers=[0])], devices)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, devices = Path(sys.argv[1]), int(sys.argv[2])
    result = main(devices, place) if devices > 1 else loaded("text", place)
    name = f"result_{torch.distributed.get_rank()}.pt" if devices > 1 else "loaded.pt"
    torch.save(result, place / name)
