"""Logits in a precision that holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.kernels import without_autocast


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
