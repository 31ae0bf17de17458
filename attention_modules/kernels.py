"""How mechanisms call scaled dot-product attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def transforms_active() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform is at work."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    # Private: where it is absent, no transform can be seen.
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def check_dropout(dropout_p: float) -> None:
    """Refuse what is no probability.

    Raises:
        ValueError: if it is below 0 or above 1.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a probability from 0 to 1, got {dropout_p!r}")


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

    Raises:
        ValueError: if ``dropout_p`` is no probability.
    """
    check_dropout(dropout_p)
    if not torch.compiler.is_compiling() and transforms_active():
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


def _flash_kernels_exist() -> bool:
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    return hasattr(torch, "_fused_sdp_choice") and all(hasattr(torch.ops.aten, name) for name in names)


HAS_FLASH_KERNELS = _flash_kernels_exist()


def flash_applies(k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> bool:
    """Whether :func:`flash` and :func:`flash_backward` may stand for attention(k, k, v) and its gradient.

    False on devices other than the CPU, where the kernels are missing, under
    ``sdpa_kernel(SDPBackend.MATH)``, in compiled or traced code and under transforms.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not HAS_FLASH_KERNELS or k.device.type != "cpu":
        return False
    if type(k) not in (Tensor, nn.Parameter) or type(v) not in (Tensor, nn.Parameter) or transforms_active():
        return False
    if attn_mask is not None and attn_mask.requires_grad:
        return False
    # What SDPA itself would choose here, requirements on shapes and dtypes and the user's context included.
    return torch._fused_sdp_choice(k, k, v, attn_mask, 0.0, is_causal, scale=scale) == SDPBackend.FLASH_ATTENTION.value


def flash_mask(attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as the flash kernels take it: additive, of the queries' dtype."""
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        return torch.zeros_like(attn_mask, dtype=dtype).masked_fill(~attn_mask, float("-inf"))
    return attn_mask.to(dtype)


def flash(
    q: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """attention(q, q, v) and the logarithm of each row's sum of exponentials, ``[B, H, N, d]`` and ``[B, H, N]``."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, q, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )


def flash_backward(
    grad: Tensor,
    q: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`flash` for q (as query and as key together) and v."""
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, q, v, out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return grad_query.add_(grad_key), grad_value


def autocast(x: Tensor) -> Tensor:
    """The tensor in the dtype in which autocast would run attention; itself outside autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
