"""Attention kernels of PyTorch that also return the log-sum-exp of each row (private calls, hence guarded)."""

from __future__ import annotations

import torch
from torch import Tensor


def _additive(visible: Tensor | None, q: Tensor, k: Tensor, expand: bool) -> Tensor | None:
    """0 where visible, -inf where not, in the type of q."""
    if visible is None:
        return None
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    return bias.expand(*q.shape[:3], k.shape[2]) if expand else bias


def lse_and_mean_key(
    q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Log-sum-exp of each row ``[B, H, N]`` and A K ``[B, H, N, d]`` from one attention call, without gradients.

    None where no kernel of this PyTorch fits: an unknown device, or a mask together with causality.
    Rows that see nothing hold unspecified values.

    Args:
        q: queries ``[B, H, N, d]``, fp32.
        k: keys ``[B, H, M, d]``, fp32.
        visible: boolean, four dimensions, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits.
    """
    if visible is not None and is_causal:
        return None
    q, k = q.detach(), k.detach()
    if q.device.type == "cpu":
        call = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
        if call is None:
            return None
        out, lse = call(q, k, k, 0.0, is_causal, attn_mask=_additive(visible, q, k, False), scale=scale)
        return lse, out
    if q.device.type == "cuda" and q.shape[-1] % 4 == 0:
        call = getattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", None)
        # The kernel reads the mask in aligned blocks of columns.
        if call is None or (visible is not None and k.shape[2] % 8):
            return None
        out, lse, *_ = call(q, k, k, _additive(visible, q, k, True), True, 0.0, is_causal, scale=scale)
        return lse[..., : q.shape[2]], out  # the kernel pads the rows of lse
    return None
