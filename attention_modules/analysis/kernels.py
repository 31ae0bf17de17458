"""Attention kernels of PyTorch that also return the log-sum-exp of each row (private calls, hence guarded)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_modules.kernels import EFFICIENT, FLASH, private_operator


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf where not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _cpu(q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    flash = private_operator(FLASH)
    if flash is None:
        return None
    mask = None if visible is None else _additive(visible, q.dtype)
    out, lse = flash(q, k, k, 0.0, is_causal, attn_mask=mask, scale=scale)
    return lse, out


def _cuda(q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    efficient = private_operator(EFFICIENT)
    if efficient is None:
        return None
    bias = None
    if visible is not None:
        keys = k.shape[2]
        bias = _additive(visible.expand(*visible.shape[:3], keys), q.dtype)
        bias = nn.functional.pad(bias, (0, -keys % 16))[..., :keys]  # the kernel takes no rows that are not aligned
        bias = bias.expand(*q.shape[:3], keys)
    out, lse, *_ = efficient(q, k, k, bias, True, 0.0, is_causal, scale=scale)
    return lse[..., : q.shape[2]], out  # the kernel pads the rows of lse


_KERNELS = {"cpu": _cpu, "cuda": _cuda}


def lse_and_mean_key(
    q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Log-sum-exp of each row ``[B, H, N]`` and A K ``[B, H, N, d]`` from one attention call, without gradients.

    None where no kernel of this PyTorch takes these arguments, as a mask together with causality, causality with
    a scale of 0 or less (NaN on the CPU), or an empty batch.
    Rows that see nothing hold unspecified values.

    Args:
        q: queries ``[B, H, N, d]``, fp32.
        k: keys ``[B, H, M, d]``, fp32.
        visible: boolean, four dimensions, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits.
    """
    kernel = _KERNELS.get(q.device.type)
    if kernel is None or not len(q) or (is_causal and (visible is not None or scale <= 0)):
        return None
    try:
        return kernel(q.detach(), k.detach(), visible, is_causal, scale)
    except (AttributeError, TypeError, RuntimeError):  # a shape or dtype that it does not take
        return None
