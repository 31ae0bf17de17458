"""Stabilizers in two processes, each with half of the samples of every step; run as a script, in two processes."""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Subset

from lightning_tasks.callbacks import AttentionDiversification, EntropyRegularizer, QKClip, SigmaReparam
from tests.lightning_tasks.callbacks.modules import TinyLM, batches, fit, weights_of

TAU = 0.05  # which most heads pass
CALLBACKS = {
    "none": list,
    "QKClip": lambda: [QKClip(TAU)],
    "AttentionDiversification": lambda: [AttentionDiversification(5.0, threshold=1.0)],
    "EntropyRegularizer": lambda: [EntropyRegularizer(20.0, floor=0.95)],
    "SigmaReparam": lambda: [SigmaReparam(gamma=1.0)],
}


def trained(*callbacks, ranks=1, rank=0, **options):
    """Weights after two epochs of three steps, each of eight samples over all ranks."""
    data, size = batches(3, 8).dataset, 8 // ranks
    chosen = [8 * step + size * rank + index for step in range(3) for index in range(size)]
    module = TinyLM()
    loader = DataLoader(Subset(data, chosen), batch_size=size)
    fit(module, callbacks, loader, max_epochs=2, use_distributed_sampler=False, **options)
    return weights_of(module)


if __name__ == "__main__":
    options = {"ranks": 2, "rank": int(os.environ["LOCAL_RANK"]), "strategy": "ddp", "devices": 2}
    found = {name: trained(*make(), **options).tolist() for name, make in CALLBACKS.items()}
    if torch.distributed.get_rank() == 0:
        json.dump(found, sys.stdout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
