"""The random state of each process, for a run that goes on where another stopped."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the processor, and that of ``device`` where it is a GPU, of this process."""
    own = [torch.get_rng_state()]
    if device.type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    return own


def gather_random_states(device: torch.device) -> list[list[Tensor]]:
    """By rank: the state of the processor, and that of ``device`` where it is a GPU.

    Each process uses one device, so what it has as the state of the others is not what they draw from. All processes
    must call this.
    """
    own = random_state(device)
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    states: list[list[Tensor]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(states, own)
    return states


def set_random_state(states: list[list[Tensor]], rank: int, device: torch.device) -> None:
    """Go on from ``states[rank]``; a rank that had no process before keeps the state that it has."""
    if rank >= len(states):
        return
    cpu, *devices = states[rank]
    torch.set_rng_state(cpu.cpu())
    if device.type == "cuda" and devices:
        torch.cuda.set_rng_state(devices[0].cpu(), device)
