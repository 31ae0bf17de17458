"""A data loader that a resumed run goes on with where the killed one was."""

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader


class ResumableLoader(DataLoader):
    """A `DataLoader` whose state is its epoch and the number of batches given in it; Lightning checkpoints both.

    What was given before is left out, not loaded again. The order must follow from the sampler's epoch alone, as that
    of `EpochShuffle` does. Give it a generator of its own, so that starting an epoch does not move the global random
    state.
    """

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
        return getattr(self.sampler, "epoch", 0)

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
