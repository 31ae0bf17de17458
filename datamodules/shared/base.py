"""What the data modules share: checked loader settings."""

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


class DataModule(LightningDataModule):
    """A data module with checked loader settings.

    Args:
        batch_size: samples a batch and process.
        num_workers: loader processes; 0 loads in the training process.

    Raises:
        ValueError: a number is below its limit.
    """

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size = check_at_least("batch_size", batch_size, 1)
        self.num_workers = check_at_least("num_workers", num_workers, 0)

    @property
    def world_size(self) -> int:
        """Processes that share the data: those of the trainer, 1 without one."""
        return self.trainer.world_size if self.trainer is not None else 1
