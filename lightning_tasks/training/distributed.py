"""What several processes must not count twice, and count at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from attention_modules.precision import widest


def repeated_rows(dataloader: Any, batch_idx: int, rows: int) -> Tensor | None:
    """Which rows ``[rows]`` of a batch a :class:`DistributedSampler` added to make all processes' shares equal.

    It hands out position ``rank + i * num_replicas`` as the i-th sample, and repeats samples beyond the data set's
    end. Those that the data set itself filled up with, from its ``num_real`` on, count as repeated. None where nothing
    can be repeated (another sampler, or ``drop_last``). A list of one loader counts as it.
    """
    if isinstance(dataloader, (list, tuple)) and len(dataloader) == 1:
        (dataloader,) = dataloader
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    first = batch_idx * dataloader.batch_size
    positions = sampler.rank + torch.arange(first, first + rows) * sampler.num_replicas
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    return positions >= min(samples, getattr(dataloader.dataset, "num_real", samples))


class EpochSums:
    """Sums and counts by name over the batches of an evaluation, which all processes join once, at its end.

    Nothing waits for another process before :meth:`join`, so that they may have different numbers of batches, or none.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a sum and of how many it is, scalars; in float64 where the device has it, as counts grow large."""
        both = torch.stack([total, count.to(total.device)]).to(widest(total.device))
        self._sums[name] = self._sums[name] + both if name in self._sums else both

    def join(self, trainer: Any, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Means, in float32, of those of ``names`` that any process added to, and forget them.

        Every process must call this, with the same names. NaN where nothing was counted.
        """
        sums, self._sums = self._sums, {}
        if not names:
            return {}
        none = torch.zeros(3, dtype=widest(device), device=device)
        rows = [torch.cat([sums[name].to(none), none[:1] + 1]) if name in sums else none for name in names]
        whole = trainer.strategy.reduce(torch.stack(rows), reduce_op="sum")  # [names, 3]
        means = (whole[:, 0] / whole[:, 1]).float()
        added = whole[:, 2].tolist()
        return {name: mean for name, mean, processes in zip(names, means, added, strict=True) if processes}


def mean_of_processes(trainer: Any, value: Tensor, rows: int) -> Tensor | None:
    """The mean of a batch's value, a scalar, over the processes whose batch has rows; None where none has.

    Every process must call this, also one without rows, whose value is finite and counts for nothing. Such a process
    alone waits for its device, to learn whether another one has rows.
    """
    if getattr(trainer, "world_size", 1) == 1:
        return value if rows else None
    counts = torch.full_like(value, float(rows > 0))
    total, processes = trainer.strategy.reduce(torch.stack([value * counts, counts]), reduce_op="sum")
    return total / processes if rows or processes > 0 else None


def log_joined(pl_module: Any, values: Mapping[str, Tensor]) -> None:
    """Log at the end of an evaluation what all processes have joined already, and so all have alike."""
    # With sync_dist, whose mean of equal values changes none, as Lightning warns of an epoch's values without it.
    for name, value in values.items():
        pl_module.log(name, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)


def epoch_weight(trainer: Any, rows: int) -> int:
    """What to give as ``batch_size`` to ``log(..., on_epoch=True, sync_dist=True)`` for a value of ``rows`` rows.

    Lightning divides by the mean of the weights over the processes, cut off to an integer: of (1, 0) that is 0. Times
    the number of processes nothing is cut off.
    """
    return rows * int(trainer.world_size)
