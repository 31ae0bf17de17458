"""What the data modules share: checked loader settings."""

import os
from typing import Any

from lightning.pytorch import LightningDataModule


def check_at_least(name: str, value: Any, limit: int) -> int:
    """Returns `value`.

    Raises:
        ValueError: it is not an integer, or below `limit`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < limit:
        raise ValueError(f"{name} is {value!r}: give an integer of at least {limit}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Returns `value`.

    Raises:
        ValueError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        cure = ", a string: write it without quotes" if isinstance(value, str) else ""
        raise ValueError(f"{name} must be True or False, got {value!r}{cure}")
    return value


def default_workers(processes: int) -> int:
    """Loader processes of one of several processes on a machine: its share of the cores that are available to it.

    `$ATTNSWAP_NUM_WORKERS` comes first. 0 where that share is one core, which the training process itself has.
    """
    if given := os.environ.get("ATTNSWAP_NUM_WORKERS"):
        return check_at_least("ATTNSWAP_NUM_WORKERS", int(given) if given.isdecimal() else given, 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, processes)
    return share if share > 1 else 0


class DataModule(LightningDataModule):
    """A data module with checked loader settings.

    Args:
        batch_size: samples a batch and process.
        num_workers: loader processes; 0 loads in the training process, None takes :func:`default_workers`.

    Raises:
        ValueError: a number is below its limit.
    """

    def __init__(self, batch_size: int, num_workers: int | None) -> None:
        super().__init__()
        self.batch_size = check_at_least("batch_size", batch_size, 1)
        self.num_workers = num_workers if num_workers is None else check_at_least("num_workers", num_workers, 0)

    @property
    def world_size(self) -> int:
        """Processes that share the data: those of the trainer, 1 without one."""
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def loader_workers(self) -> int:
        """The number of loader processes, of each process that trains."""
        if self.num_workers is not None:
            return self.num_workers
        return default_workers(self.trainer.num_devices if self.trainer is not None else 1)
