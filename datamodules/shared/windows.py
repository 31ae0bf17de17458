"""A stream of tokens as windows of equal length, and the order in which they come."""

import os
from collections.abc import Iterator, Sequence, Sized
from functools import partial
from mmap import mmap
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

IGNORED = -100
"""The target of a position that does not count (the default of `torch.nn.functional.cross_entropy`)."""


class CutFileError(OSError):
    """A file of prepared tokens that was cut while it was read."""


class TokenWindows(Dataset):
    """Contiguous windows that do not overlap; every token of the stream is a target exactly once.

    Window i has the targets `ids[i T : (i + 1) T]`, and as inputs the tokens one place before these; `start` stands
    before the first. Places after the end have the target -100, also in whole windows that fill up to a multiple of
    `multiple_of` (so that every process of several gets equally many, none twice).

    Args:
        ids: the stream, `[tokens]` of integers, a memory map or array.
        num_tokens: T, the length of a window in tokens.
        start: the id before the first token (`<eos>`).
        multiple_of: the number of windows is rounded up to a multiple of this.
    """

    def __init__(self, ids: np.ndarray, num_tokens: int, start: int, multiple_of: int = 1) -> None:
        self.ids, self.num_tokens, self.start = ids, num_tokens, start
        self.num_real = -(-len(ids) // num_tokens)  # windows that hold tokens
        self._length = -(-self.num_real // multiple_of) * multiple_of

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        """A memory map travels to another process as the name of its file, not as its content."""
        state = self.__dict__.copy()
        if _whole_map(self.ids):
            names = {"dtype": self.ids.dtype, "offset": self.ids.offset, "shape": self.ids.shape}
            state["ids"] = partial(np.memmap, self.ids.filename, mode="r", **names)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "ids": state["ids"]() if isinstance(state["ids"], partial) else state["ids"]}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Window `index` as (inputs `[T]`, targets `[T]`), int64."""
        inputs, targets = self.__getitems__([range(self._length)[index]])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch of windows as (inputs `[B, T]`, targets `[B, T]`), int64.

        Raises:
            CutFileError: the file of a memory map has become shorter.
        """
        _refuse_cut(self.ids)
        size = len(self.ids)
        places = np.asarray(indices, dtype=np.int64)[:, None] * self.num_tokens + np.arange(-1, self.num_tokens)
        tokens = self.ids[places.clip(0, size - 1)].astype(np.int64)  # [B, T + 1]
        inside = (places >= 0) & (places < size)
        inputs = np.where(inside, tokens, self.start)[:, :-1]
        targets = np.where(inside, tokens, IGNORED)[:, 1:]
        return torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy())


def _whole_map(ids: Any) -> TypeGuard[np.memmap]:
    """Whether an array is a memory map as it was opened; a part of one does not know its place in the file."""
    return isinstance(ids, np.memmap) and isinstance(ids.base, mmap)


def _refuse_cut(ids: Any) -> None:
    """Refuse a memory map whose file has become shorter: reading behind its end would end the process by SIGBUS.

    A cut between this look and the read still does that; a `pread` for each window took four times as long as the map.
    """
    if not _whole_map(ids):
        return
    file: Any = ids.base
    found, expected = file.size(), ids.offset + ids.nbytes
    if found < expected:
        raise CutFileError(
            f"{ids.filename} has {found} bytes and had {expected} when it was opened: it was cut while it was read. "
            "Start again: prepared text that is damaged is made again; leave the cache alone while a run reads it"
        )


class EpochShuffle(RandomSampler):
    """A new order every epoch that depends on the seed of `seed_everything` and the epoch alone.

    Nothing drawn elsewhere moves it, so models that initialize differently see the same order, and a resumed run the
    order of its epoch. It is the order of `torch.utils.data.DistributedSampler`, which Lightning puts in its place
    of a `RandomSampler` for several processes: together these see the same windows in each step.

    Args:
        samples: what is put in order.

    Example:
        >>> from attnswap.datamodules import EpochShuffle
        >>> order = EpochShuffle(range(4))
        >>> sorted(order) == [0, 1, 2, 3] and list(order) == list(order)
        True
    """

    def __init__(self, samples: Sized) -> None:
        super().__init__(samples)  # type: ignore[arg-type]
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.epoch = 0
        self.told = False
        """Whether `set_epoch` was called since the last pass began."""

    def set_epoch(self, epoch: int) -> None:
        """Selects the order of `epoch`; Lightning calls this, and a loop of one's own must."""
        self.epoch, self.told = epoch, True

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())
