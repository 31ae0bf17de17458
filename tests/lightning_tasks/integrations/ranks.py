"""Watched loops in two processes, each with half of the samples of every step; run as a script, in two processes."""

import json
import os
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import attnswap
from lightning_tasks.callbacks import AttentionMonitor, EntropyRegularizer, LocAteR, QKClip
from lightning_tasks.callbacks.base import whole
from tests.lightning_tasks.callbacks.modules import TinyLM
from tests.lightning_tasks.callbacks.stabilizers.ranks import loader_of

CALLBACKS = {
    "none": list,
    "AttentionMonitor": lambda: [AttentionMonitor(every_n_steps=1)],
    "LocAteR": lambda: [LocAteR(0.1, gamma=0.1)],
    "QKClip": lambda: [QKClip(0.05)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(20.0, floor=0.95)],
}


def trained(callbacks, ranks=1, rank=0, shards=False):
    """Weights after three steps, each of eight samples over all ranks, and how often something was logged."""
    module, logged = TinyLM(), []
    if shards:
        for each in (*module.net["encoder"].layers, module):
            fully_shard(each, mesh=init_device_mesh("cpu", (ranks,)))
    model = DistributedDataParallel(module) if ranks > 1 and not shards else module
    optimizer = module.configure_optimizers()
    log = lambda values, step: logged.append(step)  # noqa: E731
    with attnswap.watch(model, log=log, callbacks=callbacks, optimizer=optimizer, accumulate=1 + shards):
        for inputs, targets in loader_of(ranks, rank):
            for again in range(1 + shards):  # the first pass of a sharded step leaves its gradients whole
                if shards:
                    module.set_requires_gradient_sync(bool(again))
                (cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / (1 + shards)).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [whole(each.detach()).flatten() for each in module.parameters()]
    return torch.cat(weights), len(logged)


if __name__ == "__main__":
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = {name: trained(make(), 2, rank) for name, make in CALLBACKS.items()}
    found["LocAteR, sharded"] = trained(CALLBACKS["LocAteR"](), 2, rank, shards=True)
    json.dump({name: [weights.tolist(), logged] for name, (weights, logged) in found.items()}, sys.stdout)
    distributed.barrier()
    distributed.destroy_process_group()
