"""LocAteR as a callback against LocAteR written into the loss; run as a script, in two processes."""

import itertools
import json
import sys

import torch

from lightning_tasks.callbacks import LocAteR
from tests.lightning_tasks.callbacks.modules import DIM, HEADS, TinyLM, batches, fit, weights_of

WEIGHT, GAMMA, TARGET = 0.02, 0.3, 0.5
PRECISIONS = ("32-true", "bf16-mixed")
CELLS = list(itertools.product(PRECISIONS, (1, 2), (None, 0.5)))


def naive_penalty(module):
    """The penalty by its definition, from the dense W of each head."""
    total = 0.0
    with torch.autocast("cpu", enabled=False):
        for layer in module.net["encoder"].layers:
            w_q, w_k, _ = layer.self_attn.in_proj_weight.chunk(3)
            for head in range(HEADS):
                rows = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
                w = w_q[rows].T @ w_k[rows]
                total = total + w.square().sum() + GAMMA * (w.trace() - TARGET) ** 2
    return WEIGHT * total


class PenaltyInLoss(TinyLM):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + naive_penalty(self)


def callback(**options):
    return LocAteR(WEIGHT, gamma=GAMMA, mean_target=TARGET, **options)


def difference(precision, accumulate, clip, **options):
    """Largest difference in any weight after five batches: callback against loss, and callback against neither."""
    options |= {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    with_callback, in_loss, without = TinyLM(), PenaltyInLoss(), TinyLM()
    fit(with_callback, [callback()], batches(10), limit_train_batches=5, **options)
    fit(in_loss, [], batches(10), limit_train_batches=5, **options)
    fit(without, [], batches(10), limit_train_batches=5, **options)
    found = weights_of(with_callback)
    return (found - weights_of(in_loss)).abs().max().item(), (found - weights_of(without)).abs().max().item()


if __name__ == "__main__":
    results = [difference(*cell, strategy="ddp", devices=2) for cell in CELLS]
    if torch.distributed.get_rank() == 0:
        json.dump({"world": torch.distributed.get_world_size(), "results": results}, sys.stdout)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
