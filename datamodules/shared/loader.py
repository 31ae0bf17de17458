"""A data loader that a resumed run goes on with where the killed one was."""

import os
import random
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, get_worker_info

from .windows import EpochShuffle


class InOrder(SequentialSampler):
    """The order of the data set, in every epoch: a `SequentialSampler` that is told the epoch.

    Its seed, that of `seed_everything`, is for what worker processes draw.
    """

    epoch = 0
    told = False  # since the last pass began

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch; Lightning calls this."""
        self.epoch, self.told = epoch, True


class ResumableLoader(DataLoader):
    """A `DataLoader` whose state is its epoch and the number of batches given in it; Lightning checkpoints both.

    What was given before is left out, not loaded again. The order follows from seed and epoch alone: with
    `shuffle=True` it is that of :class:`EpochShuffle`, without it that of the data set. A resumed loader goes on with
    the seed of its checkpoint. In worker processes what random transforms draw for a batch, by torch, `random` or
    `numpy.random`, follows from seed, epoch and the batch's place, however many workers there are. In the training
    process they draw from the global random states, which :class:`~attnswap.callbacks.ExactResume` restores.

    Args:
        dataset: has a length and items by index.
        batch_size, shuffle, sampler: as for a `DataLoader`; a sampler of your own needs `epoch` and `set_epoch`, as
            those of `torch.utils.data.DistributedSampler`, by which its order is the same when an epoch is resumed.
        **options: as for a `DataLoader`. Of a `generator` the initial seed counts, in place of that of
            `seed_everything`: two loaders with one seed are shuffled alike where they are equally long. By default it
            has a generator of its own, so that starting an epoch does not move the global random state.

    Raises:
        ValueError: the data set is an `IterableDataset`, the sampler has no `epoch` and `set_epoch`, or workers give
            batches in any order (`in_order=False`), so that what was given before is not known; or an epoch is resumed
            with another number of samples, another batch size (summed over processes) or another `shuffle` than it
            began with.

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
        if type(sampler) is SequentialSampler:
            sampler = InOrder(sampler.data_source)
        elif sampler is None and batches is None:
            sampler, shuffle = (EpochShuffle if shuffle else InOrder)(dataset), None
            if options.get("generator") is not None:
                sampler.seed = options["generator"].initial_seed() % 2**62
        order = sampler if batches is None else getattr(batches, "sampler", None)
        if not (hasattr(order, "set_epoch") and hasattr(order, "epoch")):
            what = "sampler" if batches is None else "batch_sampler"
            raise ValueError(
                f"ResumableLoader: {what} has a {type(batches if order is None else order).__name__} without set_epoch "
                "and epoch, so that its order in a resumed epoch is not known: leave it out and give shuffle=True or "
                "False, or give a sampler with both, as DistributedSampler has, which a batch_sampler has as sampler"
            )
        if options.get("num_workers") and not options.get("in_order", True):
            raise ValueError(
                "ResumableLoader: with in_order=False workers give batches in an order that no state tells, so that a "
                "resumed epoch would have some twice: leave it out"
            )
        if options.get("generator") is None:
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_size, shuffle, sampler, **options)

    _given = (0, 0)  # an epoch, and how many of its batches were given
    _skip = 0
    _passes: tuple[int, set[object]] = (-1, set())  # an epoch, and those that are not over
    _is_taken = False  # whether a pass was the first since the sampler was told an epoch
    _resume: dict[str, Any] | None = None

    def __iter__(self) -> Any:
        # A generator: workers start at the first batch, when Lightning has told the sampler its epoch. A resumed run
        # asks for the iterator before that. Who takes one batch, of more, may only look at it.
        order = self._order
        if is_told := getattr(order, "told", False):
            order.told = False
            if self._is_taken:  # another epoch begins, or this one from its start
                self._resume = None
        resume, self._skip, self._is_taken = self._resume, 0, self._is_taken or is_told
        if resume is not None and resume["epoch"] == order.epoch and resume["batches"]:
            self._resume = None
            self._refuse_other_batches(resume)
            self._resume, self._skip = resume, resume["batches"]
        again, first, place = not is_told and self._is_same_epoch(), self._skip, self._skip
        if is_told or self._passes[0] != order.epoch:  # one of an earlier epoch may never be over
            self._passes = order.epoch, set()
        passes, own = self._passes[1], object()
        passes.add(own)
        try:
            for place, batch in enumerate(super().__iter__(), start=first + 1):
                epoch, before = self._given
                is_pass = place > first + 1 or place == len(self)
                if is_pass:
                    self._settle(resume)
                if place == first + 2 and again:
                    self._warn_of_same_epoch()
                if is_pass or passes == {own} or epoch != order.epoch or before < place:
                    self._given = order.epoch, place
                yield batch
            self._settle(resume)
            if place < first + 2 and again:
                self._warn_of_same_epoch()
        finally:
            passes.discard(own)

    def _settle(self, resume: dict[str, Any] | None) -> None:
        if self._resume is resume:
            self._resume = None

    def _warn_of_same_epoch(self) -> None:
        warnings.warn(
            f"ResumableLoader: epoch {self._order.epoch} was given whole, and nobody has told the sampler of another: "
            "its order and draws come once more, as where a loader is cycled beside a longer one; in a loop of your "
            "own, call loader.sampler.set_epoch(epoch) before each pass",
            stacklevel=3,
        )

    def _is_same_epoch(self) -> bool:
        """Lightning tells the sampler each epoch; a loop of one's own must do so."""
        order, number = self._order, len(self)
        if not isinstance(order, EpochShuffle):
            return False
        return bool(self._given == (order.epoch, number) or self._skip >= number > 0)

    @property
    def _index_sampler(self) -> Any:
        return _Rest(super()._index_sampler, self)

    @property
    def _order(self) -> Any:
        return self.sampler if hasattr(self.sampler, "set_epoch") else self.batch_sampler.sampler  # type: ignore[union-attr]

    def _batches(self) -> dict[str, Any]:
        """What says which samples a batch has, beside seed and epoch."""
        order, size = self._order, getattr(self.batch_sampler, "batch_size", 1)
        return {
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "batch_size": size * getattr(order, "num_replicas", 1),
            "shuffle": isinstance(order, RandomSampler) or bool(getattr(order, "shuffle", False)),
        }

    def _refuse_other_batches(self, state: dict[str, Any]) -> None:
        now = self._batches().items()
        other = [f"{name} is {state[name]} there and {own} here" for name, own in now if state.get(name, own) != own]
        if other:
            raise ValueError(
                f"ResumableLoader: the checkpoint lies behind batch {state['batches']} of epoch {state['epoch']}, and "
                f"{', '.join(other)} (batch_size summed over processes), so that the rest of the epoch is not known: "
                "give what the checkpoint has, or resume from one at the end of an epoch"
            )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its batches were given, and by what its order is known."""
        epoch, batches = self._given
        now = self._order.epoch
        place = {"epoch": now, "batches": batches if epoch == now else 0}
        return {**place, "seed": getattr(self._order, "seed", None), **self._batches()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave out what was given before, when that epoch is iterated over, and go on with its seed."""
        self._resume, self._is_taken = dict(state), False
        if hasattr(self._order, "told"):
            self._order.told = False  # of a pass that never began
        self._given = state["epoch"], state["batches"]
        if state.get("seed") is not None and hasattr(self._order, "seed"):
            self._order.seed = state["seed"]


class _Drawn:
    """The indices of a batch on their way to a worker process, which draws for them from a seed of their own."""

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices, self.seed = indices, seed

    def __reduce__(self) -> Any:
        return _drawn, (self.indices, self.seed % 2**32)


def _drawn(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what transforms draw from
        torch.default_generator.manual_seed(seed)
    return indices


class _Rest:
    """The batches of indices that the loader is not to skip; nothing that it skips is loaded."""

    def __init__(self, batches: Any, loader: ResumableLoader) -> None:
        # Not the loader itself, which holds this one by its iterator: workers of what ends in a garbage collection are
        # waited for five seconds each, as the collector closes their queues before they are told to end.
        self.batches, self.loader = batches, ref(loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader()
        skip = loader._skip if loader is not None else 0
        rest = islice(iter(self.batches), skip, None)
        if loader is None or not loader.num_workers:
            return rest
        order = loader._order
        own = (*(int(getattr(order, name, 0) or 0) for name in ("seed", "rank")), int(order.epoch))
        return (_Drawn(batch, hash((*own, place))) for place, batch in enumerate(rest, start=skip))

    def __len__(self) -> int:
        return len(self.batches)
