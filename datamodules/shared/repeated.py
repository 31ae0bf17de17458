"""Repeated augmentation: each image of a step several times, augmented in other ways."""

import os
from collections.abc import Iterator
from typing import Any

from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DistributedSampler


class Again(int):
    """The place of a sample that comes once more, and its number among these; the first is an int."""

    repeat: int

    def __new__(cls, index: int, repeat: int) -> "Again":
        """As an int, which pickles and counts as one."""
        made = super().__new__(cls, index)
        made.repeat = repeat
        return made

    def __reduce__(self) -> tuple[type["Again"], tuple[int, int]]:
        return Again, (int(self), self.repeat)


class RepeatedAugmentation(RepeatAugSampler, DistributedSampler):
    """timm's order of repeated augmentation, of the seed of `seed_everything`; for one process too.

    Each image comes `repeats` times in a row, over processes in turn, and an epoch ends after as many images as there
    are: with three repeats it shows a third of them (Hoffer et al., CVPR 2020; as DeiT trains). Lightning leaves
    a `DistributedSampler` as it is. Places of samples that come again are ``Again``, by which
    a data set of images draws for each time anew.

    Args:
        samples: what is put in order.
        repeats: how often each comes.
        processes: how many train.
        process: number of this one.

    Example:
        >>> from attnswap.datamodules import RepeatedAugmentation
        >>> order = list(RepeatedAugmentation(range(6), repeats=3))
        >>> len(order), len(set(order))
        (6, 2)
    """

    def __init__(self, samples: Any, repeats: int = 3, processes: int = 1, process: int = 0) -> None:
        RepeatAugSampler.__init__(self, samples, processes, process, num_repeats=repeats)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.seed + self.epoch  # by which timm seeds the order
        try:
            order = [*RepeatAugSampler.__iter__(self)]
        finally:
            self.epoch = epoch
        times = ((self.rank + place * self.num_replicas) % self.num_repeats for place in range(len(order)))
        return iter([Again(index, time) if time else index for index, time in zip(order, times, strict=True)])
