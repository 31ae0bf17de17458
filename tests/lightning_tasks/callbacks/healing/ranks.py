"""Healing in two processes, by DDP and sharded by FSDP2; run as a script, in two processes."""

import json
import os
import sys

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

from lightning_tasks.callbacks import Heal, SwapAttention, swap_now
from lightning_tasks.callbacks.base import whole
from tests.lightning_tasks.callbacks.healing.healed import Task, data
from tests.lightning_tasks.callbacks.modules import fit

STAGES = [{"match": "layers", "steps": 3}, {"match": "logits", "steps": 3, "task_weight": 0.1}, {"match": "task"}]


class Sharded(Task):
    """Shards its network in ``configure_model`` where there is a mesh."""

    def configure_model(self):
        swap_now(self)
        if self._device_mesh is not None and not hasattr(self, "sharded"):
            self.sharded = True
            for part in (*self.net.encoder.layers, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


def loader_of(ranks, rank):
    """Eight batches, each of four samples over all ranks."""
    size = 4 // ranks
    chosen = [4 * step + size * rank + index for step in range(8) for index in range(size)]
    return DataLoader(Subset(data(8).dataset, chosen), batch_size=size)


def healed(kind=Task, ranks=1, rank=0, **options):
    """Weights, and what was logged, of eight steps."""
    torch.manual_seed(1)
    module, loader = kind(), loader_of(ranks, rank)
    callbacks = [SwapAttention("symmetric"), Heal(STAGES)]
    trainer = fit(module, callbacks, loader, loader, use_distributed_sampler=False, **options)
    weights = torch.cat([whole(one).detach().flatten() for one in module.parameters()])
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/drift")}
    return {"weights": weights.tolist(), **logged}


if __name__ == "__main__":
    options = {"ranks": 2, "rank": int(os.environ["LOCAL_RANK"]), "devices": 2}
    sharding = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = {
        "ddp": healed(strategy="ddp_find_unused_parameters_true", **options),
        "fsdp2": healed(Sharded, strategy=sharding, **options),
    }
    if torch.distributed.get_rank() == 0:
        json.dump(found, sys.stdout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
