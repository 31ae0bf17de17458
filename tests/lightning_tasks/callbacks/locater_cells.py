"""LocAteR as a callback against LocAteR written into the loss; run as a script, in two processes."""

import itertools
import json
import sys
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import fully_shard

from lightning_tasks.callbacks import AttentionMonitor, LocAteR
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


def trained(module, *callbacks, cell, **options):
    """Weights after five batches a process, with a cell's precision, accumulation and clipping."""
    precision, accumulate, clip = cell
    options |= {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    fit(module, callbacks, batches(10), limit_train_batches=5, **options)
    return weights_of(module)


def difference(cell, other=PenaltyInLoss, **options):
    """Largest difference in any weight between the callback on a plain module and another module."""
    found = trained(TinyLM(), callback(), cell=cell, **options)
    return (found - trained(other(), cell=cell, **options)).abs().max().item()


def validation_entropy(**options):
    """Attention entropy that the monitor logs over eight validation samples of an untrained model."""
    monitor = AttentionMonitor(stages=["validation"])
    trainer = fit(TinyLM(lr=0.0), [monitor], val_loader=batches(4), limit_train_batches=1, **options)
    return trainer.callback_metrics["val/attention/entropy/mean"].item()


def gradients(shard):
    """The penalty's own gradients, with the layers whole or sharded by FSDP2."""
    module = TinyLM()
    if shard:
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in module.net["encoder"].layers:
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = SimpleNamespace(
        optimizers=[optimizer], accumulate_grad_batches=1, precision_plugin=None, callbacks=[], strategy=None
    )
    module.log = lambda *_: None
    locater = LocAteR(WEIGHT, gamma=GAMMA)
    locater.on_train_start(trainer, module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)  # away from the mean that is held
    locater.on_after_backward(trainer, module)
    locater.on_before_optimizer_step(trainer, module, optimizer)
    found = [layer.self_attn.in_proj_weight.grad for layer in module.net["encoder"].layers]
    return torch.stack([gradient.full_tensor() if shard else gradient for gradient in found])


if __name__ == "__main__":
    results = [difference(cell, strategy="ddp", devices=2) for cell in CELLS]
    entropy = validation_entropy(strategy="ddp", devices=2)
    whole, sharded = gradients(shard=False), gradients(shard=True)
    sharded_error = ((whole - sharded).abs().max() / whole.abs().max()).item()
    if torch.distributed.get_rank() == 0:
        json.dump(
            {
                "world": torch.distributed.get_world_size(),
                "results": results,
                "entropy": entropy,
                "sharded": sharded_error,
            },
            sys.stdout,
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
