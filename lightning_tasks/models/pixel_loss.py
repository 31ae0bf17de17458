"""Cross-entropy of small maps against masks of more pixels, without ever holding the logits of all pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_PIXELS = 1 << 14  # whose logits exist together


class _BandedCrossEntropy(torch.autograd.Function):
    """Sum of the pixel losses of rows that are interpolated band by band; the gradient is computed beside the loss."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, masks: Tensor, ignore_index: int) -> Tensor:
        batch, height, width, _ = rows.shape
        factor = masks.shape[1] // height
        band = max(1, _PIXELS // max(1, batch * width))
        grad = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        total = rows.new_zeros(())
        with torch.autocast(rows.device.type, enabled=False):
            for below in range(height + 1):  # pixels between the centers of the rows `below - 1` and `below`
                first = below * factor - (factor + 1) // 2
                end = min(first + factor, masks.shape[1])
                upper, lower = max(below - 1, 0), min(below, height - 1)
                for top in range(max(first, 0), end, band):
                    pixels = slice(top, min(top + band, end))
                    places = torch.arange(pixels.start, pixels.stop, dtype=rows.dtype, device=rows.device)
                    share = (places + 0.5) / factor + 0.5 - below  # of the lower row
                    logits = torch.lerp(rows[:, upper, None], rows[:, lower, None], share[:, None, None])
                    scores = logits.log_softmax(-1)  # [B, band, W, K]
                    kept = masks[:, pixels] != ignore_index
                    index = masks[:, pixels].where(kept, 0).unsqueeze(-1)
                    total -= scores.gather(-1, index).squeeze(-1).where(kept, 0).sum()
                    if grad is None:
                        continue
                    # d loss / d logits = softmax - one-hot
                    slope = scores.exp_()
                    slope.scatter_add_(-1, index, -torch.ones_like(index, dtype=slope.dtype))
                    slope *= kept.unsqueeze(-1)
                    parts = torch.stack([1 - share, share]) @ slope.flatten(2)  # [B, 2, W K]
                    grad[:, upper] += parts[:, 0].view_as(grad[:, upper])
                    grad[:, lower] += parts[:, 1].view_as(grad[:, lower])
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_output, None, None


def upsampled_cross_entropy(logits: Tensor, masks: Tensor, ignore_index: int) -> Tensor:
    """Mean cross-entropy in nats of logits that are interpolated bilinearly to the size of the masks.

    Equal to ``cross_entropy(interpolate(logits, masks.shape[1:], mode="bilinear"), masks)`` but for rounding, with the
    logits of a band of pixels at a time, in float32 (float64 for float64 logits). Second derivatives are refused.

    Args:
        logits: ``[B, h, w, K]``.
        masks: ``[B, H, W]`` int64 in 0 to K - 1, or ``ignore_index``; H is a multiple of h.
        ignore_index: the label of pixels that do not count; where none counts the loss is 0.

    Raises:
        ValueError: if the masks are not as many, or H is no multiple of h.
    """
    if masks.ndim != 3 or len(masks) != len(logits) or masks.shape[1] % logits.shape[1]:
        raise ValueError(
            f"logits {list(logits.shape)} need masks [{len(logits)}, H, W] with H a multiple of {logits.shape[1]}, got "
            f"{list(masks.shape)}"
        )
    small = logits.to(torch.promote_types(logits.dtype, torch.float32)).permute(0, 3, 1, 2)
    rows = functional.interpolate(small, size=(small.shape[2], masks.shape[2]), mode="bilinear")
    total = _BandedCrossEntropy.apply(rows.permute(0, 2, 3, 1).contiguous(), masks, ignore_index)
    return total / (masks != ignore_index).sum().clamp(min=1)
