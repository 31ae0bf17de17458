"""How mechanisms call scaled dot-product attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def transforms_active() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform is at work."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention``, in its MATH form where a transform needs more than one derivative.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``.
    """
    if not torch.compiler.is_compiling() and transforms_active():
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


def autocast(x: Tensor) -> Tensor:
    """The tensor in the dtype in which autocast would run attention; itself outside autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
