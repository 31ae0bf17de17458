"""Float64 on machines whose accelerator lacks it."""

from __future__ import annotations

from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})


def to_float64(x: Tensor) -> Tensor:
    """x in float64, on its own device, or on the CPU where that device has no float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()
