"""Sharding a network over processes by FSDP2, block by block, or by tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from attention_modules.hosts import AttentionSwapError, attention_layers
from lightning_tasks.training.tensor_parallel import spread_heads


def shard(model: nn.Module, mesh: Any) -> None:
    """Shard a network over the device mesh of ``ModelParallelStrategy``: its heads, or its blocks.

    Args:
        model: the network.
        mesh: with the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        ValueError: if both have several processes, or the network cannot be sharded so.
    """
    replicas, processes = mesh["data_parallel"].size(), mesh["tensor_parallel"].size()
    if processes == 1:
        shard_blocks(model, mesh["data_parallel"])
        return
    if replicas > 1:
        raise ValueError(
            f"data_parallel_size={replicas} and tensor_parallel_size={processes} of ModelParallelStrategy would spread "
            "each weight twice: set one of them to 1"
        )
    spread_heads(model, mesh["tensor_parallel"])


def shard_blocks(model: nn.Module, mesh: Any) -> None:
    """Shard each of the innermost blocks that hold an attention layer, and then the rest as one.

    Attention layers themselves stay whole within their block: `fully_shard` changes the class by which hosts know them.

    Args:
        model: the network, whose weights are the same in each process.
        mesh: of the processes that share it.

    Raises:
        ValueError: there is no such block.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            "ModelParallelStrategy (strategy/fsdp2) shards blocks that hold an attention layer, and "
            f"{type(model).__name__} has none: train it with strategy/ddp"
        )
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of lists and sequences of modules that hold an attention layer, but no member that does, in order."""
    try:
        layers = {layer.module for layer in attention_layers(model)}
    except AttentionSwapError:  # it has none
        return []
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    holders = {part for each in lists for part in each if part not in layers and not layers.isdisjoint(part.modules())}
    inner = {part for part in holders if not holders & {*list(part.modules())[1:]}}
    return [module for module in model.modules() if module in inner]
