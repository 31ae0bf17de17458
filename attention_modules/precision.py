"""Float64 on machines whose accelerator lacks it."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})


def to_float64(x: Tensor) -> Tensor:
    """x in float64, on its own device, or on the CPU where that device has no float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32: for sums that stay on their device."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
