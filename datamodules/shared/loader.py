"""A data loader that a resumed run goes on with where the killed one was."""

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from .windows import EpochShuffle


class InOrder(SequentialSampler):
    """The order of the data set, in every epoch: a `SequentialSampler` that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch; Lightning calls this."""
        self.epoch = epoch


class ResumableLoader(DataLoader):
    """A `DataLoader` whose state is its epoch and the number of batches given in it; Lightning checkpoints both.

    What was given before is left out, not loaded again. The order follows from the epoch alone: with `shuffle=True` it
    is that of :class:`EpochShuffle`, without it that of the data set. Random transforms in worker processes draw anew
    in an epoch that is resumed; in the training process they draw from the global random state, which
    :class:`~attnswap.callbacks.ExactResume` restores.

    Args:
        dataset: has a length and items by index.
        batch_size, shuffle, sampler: as for a `DataLoader`; a sampler of your own needs `epoch` and `set_epoch`, as
            those of `torch.utils.data.DistributedSampler`, by which its order is the same when an epoch is resumed.
        **options: as for a `DataLoader`; by default it has a generator of its own, so that starting an epoch does not
            move the global random state.

    Raises:
        ValueError: the data set is an `IterableDataset`, or the sampler has no `set_epoch`, so that what was given
            before is not known.

    Example:
        >>> from attnswap.datamodules import ResumableLoader
        >>> loader = ResumableLoader(range(6), batch_size=2)
        >>> loader.load_state_dict({"epoch": 0, "batches": 1})
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5]]
    """

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = None, sampler: Any = None, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"ResumableLoader: {type(dataset).__name__} is an IterableDataset, whose batches have no place to go "
                "on from: give a data set with a length and items by index"
            )
        batches = options.get("batch_sampler")
        if batches is None and (sampler is None or type(sampler) is SequentialSampler):
            sampler = EpochShuffle(dataset) if shuffle else InOrder(dataset)
            shuffle = None
        given = sampler if batches is None else getattr(batches, "sampler", batches)
        if not hasattr(given, "set_epoch"):
            what = "sampler" if batches is None else "batch_sampler"
            raise ValueError(
                f"ResumableLoader: {what} has a {type(given).__name__} without set_epoch, so that its order in a "
                "resumed epoch is not known: leave it out and give shuffle=True or False, or give it epoch and "
                "set_epoch, as DistributedSampler has"
            )
        if options.get("generator") is None:
            options["generator"] = torch.Generator()
        size: dict[str, Any] = {} if batches is not None else {"batch_size": batch_size}
        super().__init__(dataset, shuffle=shuffle, sampler=sampler, **size, **options)

    _given = 0
    _skip = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Any:
        # A generator: workers start at the first batch, when Lightning has told the sampler its epoch. A resumed run
        # asks for the iterator before that.
        resume, self._resume = self._resume, None
        self._skip = resume["batches"] if resume is not None and resume["epoch"] == self._epoch else 0
        for place, batch in enumerate(super().__iter__(), start=self._skip + 1):
            self._given = place
            yield batch

    @property
    def _index_sampler(self) -> Any:
        return _Rest(super()._index_sampler, self)

    @property
    def _epoch(self) -> int:
        own = self.sampler if hasattr(self.sampler, "set_epoch") else getattr(self.batch_sampler, "sampler", None)
        return getattr(own, "epoch", 0)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were given."""
        return {"epoch": self._epoch, "batches": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Leave out what was given before, when that epoch is iterated over."""
        self._resume = dict(state)
        self._given = state["batches"]


class _Rest:
    """The batches of indices that the loader is not to skip; nothing that it skips is loaded."""

    def __init__(self, batches: Any, loader: ResumableLoader) -> None:
        # Not the loader itself, which holds this one by its iterator: workers of what ends in a garbage collection are
        # waited for five seconds each, as the collector closes their queues before they are told to end.
        self.batches, self.loader = batches, ref(loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader()
        return islice(iter(self.batches), loader._skip if loader is not None else 0, None)

    def __len__(self) -> int:
        return len(self.batches)
