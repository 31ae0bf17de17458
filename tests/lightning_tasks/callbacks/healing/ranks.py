"""Healing in two processes, by DDP and sharded by FSDP2; run as a script, in two processes."""

import json
import os
import sys

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_tasks.callbacks import Heal, SwapAttention, swap_now
from lightning_tasks.callbacks.base import whole
from lightning_tasks.language_modeling import LanguageModelingTask
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


class Linear(LanguageModelingTask):
    """A small Llama, one of whose two layers is linear."""

    def __init__(self):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model, sgd = {"model_type": "llama", **sizes}, {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-4}}
        layers = {"keep_every": 2}
        super().__init__(model, 9, "gated_delta", layers=layers, chunk_size=None, optimizer=sgd)


def loader_of(kind, ranks, rank):
    """Eight batches, each of four samples over all ranks."""
    size = 4 // ranks
    chosen = [4 * step + size * rank + index for step in range(8) for index in range(size)]
    texts = torch.randint(9, (2, 32, 6), generator=torch.Generator().manual_seed(4))
    samples = TensorDataset(*texts) if kind is Linear else data(8).dataset
    return DataLoader(Subset(samples, chosen), batch_size=size)


def healed(kind=Task, ranks=1, rank=0, **options):
    """Weights, and what was logged, of eight steps."""
    torch.manual_seed(1)
    module, loader = kind(), loader_of(kind, ranks, rank)
    swap = [] if kind is Linear else [SwapAttention("symmetric")]
    callbacks = [*swap, Heal(STAGES, network="model" if kind is Linear else None)]
    trainer = fit(module, callbacks, loader, loader, use_distributed_sampler=False, **options)
    weights = torch.cat([whole(one).detach().flatten() for one in module.parameters()])
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/drift")}
    return {"weights": weights.tolist(), **logged}


if __name__ == "__main__":
    options = {"ranks": 2, "rank": int(os.environ["LOCAL_RANK"]), "devices": 2}
    sharding = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    found = {
        "ddp": healed(strategy="ddp_find_unused_parameters_true", **options),
        "linear": healed(Linear, strategy="ddp_find_unused_parameters_true", **options),
        "fsdp2": healed(Sharded, strategy=sharding, **options),
    }
    if torch.distributed.get_rank() == 0:
        json.dump(found, sys.stdout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
