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


def task_error() -> str:
    """What a task, which does not shard itself, says."""
    run = pl.Trainer(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(2, 1), logger=False)
    try:
        run.validate(*task_and_data("text", 1, 1, 1), verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def callbacks() -> list[Any]:
    every = {"every_n_steps": 1}
    shown = [AttentionMonitor(**every), PursuitMonitor(), AttentionMapLogger()]
    return [LocAteR(0.05, layers=[1]), SpectrumMonitor(**every), *shown]


def main(devices: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {
        "before": fit(Sharded, [SwapAttention("rpc", layers=[0]), *callbacks()], devices),
        "own": fit(SwapsByItself, callbacks(), devices),
        "watched": fit(NeverAsks, [AttentionMonitor(every_n_steps=1), SpectrumMonitor(every_n_steps=1)], devices),
        "decayed": fit(NeverAsks, [QKWeightDecay(0.1), LocAteR(0.05)], devices),
        "frozen": fit(NeverAsks, [FreezeQK(layers=[1])], devices),
    }
    if devices > 1:
        found["task"] = {"error": task_error()}
        found["lipschitz"] = fit(NeverAsks, [LipschitzMonitor()], devices)
        found["late"] = fit(NeverAsks, [SwapAttention("rpc", layers=[0])], devices)
    return found


if __name__ == "__main__":
    result = main(int(sys.argv[2]))
    torch.save(result, Path(sys.argv[1]) / f"result_{torch.distributed.get_rank()}.pt")
