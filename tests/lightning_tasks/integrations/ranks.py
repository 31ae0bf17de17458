"""Watched loops in two processes, each with half of the samples of every step; run as a script, in two processes."""

import json
import os
import sys

from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import attnswap
from lightning_tasks.callbacks import AttentionMonitor, EntropyRegularizer, LocAteR, QKClip
from tests.lightning_tasks.callbacks.modules import TinyLM, weights_of
from tests.lightning_tasks.callbacks.stabilizers.ranks import loader_of

CALLBACKS = {
    "none": list,
    "AttentionMonitor": lambda: [AttentionMonitor(every_n_steps=1)],
    "LocAteR": lambda: [LocAteR(0.1, gamma=0.1)],
    "QKClip": lambda: [QKClip(0.05)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(20.0, floor=0.95)],
}


def trained(callbacks, ranks=1, rank=0):
    """Weights after three steps, each of eight samples over all ranks, and how often something was logged."""
    module, logged = TinyLM(), []
    model = DistributedDataParallel(module) if ranks > 1 else module
    optimizer = module.configure_optimizers()
    with attnswap.watch(model, log=lambda values, step: logged.append(step), callbacks=callbacks, optimizer=optimizer):
        for inputs, targets in loader_of(ranks, rank):
            cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module), len(logged)


if __name__ == "__main__":
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = {name: trained(make(), 2, rank) for name, make in CALLBACKS.items()}
    json.dump({name: [weights.tolist(), logged] for name, (weights, logged) in found.items()}, sys.stdout)
    distributed.barrier()
    distributed.destroy_process_group()
