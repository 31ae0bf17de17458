"""The random states of a process, in and out of a checkpoint."""

from __future__ import annotations

import random
import struct
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, distributed

_T = TypeVar("_T")


def random_state(device: torch.device) -> list[Tensor]:
    """The states of torch, for the processor and for ``device`` where it is a GPU, of this process."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    return own


def _of_python() -> Tensor:
    """What `random` and `numpy.random` draw from, as integers: a checkpoint's tensors are read without unpickling."""
    _, words, gauss = random.getstate()
    own = [*words, gauss is not None, _bits(gauss or 0.0)]
    found = np.random.get_state(legacy=False)  # noqa: NPY002 - what transforms draw from
    if found["bit_generator"] == "MT19937":
        own += [found["has_gauss"], _bits(found["gauss"]), found["state"]["pos"], *found["state"]["key"].tolist()]
    return torch.tensor(own)


def _set_python(state: Tensor) -> None:
    values = state.tolist()
    random.setstate((3, tuple(values[:625]), _number(values[626]) if values[625] else None))
    if of_numpy := values[627:]:
        has, gauss, place, *key = of_numpy
        np.random.set_state(("MT19937", np.array(key, np.uint32), place, has, _number(gauss)))  # noqa: NPY002


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def gather_random_states(device: torch.device) -> list[list[Tensor]]:
    """By rank: the states of torch, for the processor and for ``device`` where it is a GPU, of Python and of NumPy.

    Each process uses one device, so what it has as the state of the others is not what they draw from. All processes
    must call this.
    """
    return of_all([*random_state(device), _of_python()])


def of_all(own: _T) -> list[_T]:
    """By rank: what each process has."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    found = [own] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def set_random_state(states: list[list[Tensor]], rank: int, device: torch.device) -> None:
    """Go on from ``states[rank]``; a rank that had no process before keeps the state that it has."""
    if rank >= len(states):
        return
    cpu, *devices = states[rank]
    if devices and devices[-1].dtype == torch.int64:  # not in checkpoints of earlier versions
        _set_python(devices.pop())
    torch.set_rng_state(cpu.cpu())
    if device.type == "cuda" and devices:
        torch.cuda.set_rng_state(devices[0].cpu(), device)
