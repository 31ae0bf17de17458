"""A precision that holds the numbers: logits in float32 at least, float64 where the accelerator lacks it."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.kernels import without_autocast

WITHOUT_FLOAT64 = frozenset({"mps"})


def to_float64(x: Tensor) -> Tensor:
    """x in float64, on its own device, or on the CPU where that device has no float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def widest(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32: for sums that stay on their device."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ over the last dimension in at least float32, also under autocast.

    Half precision does not hold logits before their scale: float16 ends at 65,504, and bfloat16 rounds 1,001 to 1,000.

    Args:
        x: ``[..., N, d]``.
        y: ``[..., M, d]``.

    Returns:
        ``[..., N, M]``.
    """
    with without_autocast(x.device):
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        return x.to(dtype) @ y.to(dtype).mT


def scaled_logits(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q kᵀ · scale as :func:`wide_product` computes it.

    Args:
        q: queries ``[..., N, d]``.
        k: keys ``[..., M, d]``.
        scale: factor, 1/sqrt(d) where None.

    Returns:
        ``[..., N, M]``, at least float32.
    """
    return wide_product(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
