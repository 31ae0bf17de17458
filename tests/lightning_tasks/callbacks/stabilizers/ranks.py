"""Stabilizers in two processes, each with half of the samples of every step; run as a script, in two processes."""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Subset

from lightning_tasks.callbacks import AttentionDiversification, EntropyRegularizer, QKClip, SigmaReparam
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit, weights_of
from tests.lightning_tasks.callbacks.stabilizers.probed import Probed, gradients
from tests.lightning_tasks.callbacks.stabilizers.test_map_penalties import KINDS

TAU = 0.05  # which most heads pass
CALLBACKS = {
    "none": list,
    "QKClip": lambda: [QKClip(TAU)],
    "AttentionDiversification": lambda: [AttentionDiversification(5.0, threshold=1.0)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(20.0, floor=0.95)],
    "SigmaReparam": lambda: [SigmaReparam(gamma=1.0)],
}


def loader_of(ranks, rank):
    """Three batches, each of eight samples over all ranks."""
    data, size = batches(3, 8).dataset, 8 // ranks
    chosen = [8 * step + size * rank + index for step in range(3) for index in range(size)]
    return DataLoader(Subset(data, chosen), batch_size=size)


def first_gradients(module, *callbacks, ranks=1, rank=0, **options):
    """In float64, of two batches, in a step that takes gradients of its own too."""
    options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False, **options}
    found = gradients(module, *callbacks, loader=loader_of(ranks, rank), **options)
    return torch.cat([gradient.flatten() for gradient in found.values()])


def trained(*callbacks, ranks=1, rank=0, **options):
    """Weights after two epochs of three steps, each of eight samples over all ranks."""
    module = TinyLM()
    fit(module, callbacks, loader_of(ranks, rank), max_epochs=2, use_distributed_sampler=False, **options)
    return weights_of(module)


if __name__ == "__main__":
    options = {"ranks": 2, "rank": int(os.environ["LOCAL_RANK"]), "strategy": "ddp", "devices": 2}
    found = {name: trained(*make(), **options).tolist() for name, make in CALLBACKS.items()}
    for name, (callback, _) in KINDS.items():
        found[f"gradients: {name}"] = first_gradients(Probed(), callback(), **options).tolist()
    if torch.distributed.get_rank() == 0:
        json.dump(found, sys.stdout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
