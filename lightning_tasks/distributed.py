"""What several processes must not count twice, and count at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def repeated_rows(dataloader: Any, batch_idx: int, rows: int) -> Tensor | None:
    """Which rows ``[rows]`` of a batch a :class:`DistributedSampler` added to make all processes' shares equal.

    It hands out position ``rank + i * num_replicas`` as the i-th sample, and repeats samples beyond the data set's
    end. None where nothing can be repeated (another sampler, or ``drop_last``). A list of one loader counts as it.
    """
    if isinstance(dataloader, (list, tuple)) and len(dataloader) == 1:
        (dataloader,) = dataloader
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    first = batch_idx * dataloader.batch_size
    positions = sampler.rank + torch.arange(first, first + rows) * sampler.num_replicas
    return positions >= len(sampler.dataset)  # type: ignore[arg-type]


def epoch_weight(trainer: Any, rows: int) -> int:
    """What to give as ``batch_size`` to ``log(..., on_epoch=True, sync_dist=True)`` for a value of ``rows`` rows.

    Lightning divides by the mean of the weights over the processes, cut off to an integer: of (1, 0) that is 0. Times
    the number of processes nothing is cut off.
    """
    return rows * int(trainer.world_size)
