"""Attention between normalized queries and keys, with bounded logits (Henry et al., 2020; Dehghani et al., 2023)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.options import check_choice, check_number

Gain = Literal["vector", "scalar"]


def qk_norm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float = 1e-6,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention between RMSNorm(q) and RMSNorm(k), each head's features normalized and times a gain.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        q_gain: gain of the queries, ``[d]`` or ``[1]``.
        k_gain: gain of the keys, ``[d]`` or ``[1]``.
        eps: added to the mean of squares.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if the mask's shape does not fit, or ``eps`` is not positive.

    Example:
        >>> import torch
        >>> from attnswap.functional import qk_norm_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> qk_norm_attention(q, k, v, torch.ones(8), torch.ones(8)).shape
        torch.Size([1, 3, 5, 8])
    """
    check_number("eps", eps, above=0.0)
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    width = q.shape[-1:]
    q, k = ((F.rms_norm(x, width, eps=eps) * gain).to(v.dtype) for x, gain in ((q, q_gain), (k, k_gain)))
    return attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("qk_norm")
class QKNormAttention(TensorMechanism):
    """:func:`qk_norm_attention` as a mechanism, with gains of 1 at the start.

    Args:
        spec: the layer that it serves.
        gain: ``"vector"``, one number per feature of the head, as timm and Qwen3 have it; ``"scalar"``, one per layer,
            which is what commutes with rotary positions: a layer that rotates its queries and keys refuses the vector.
        eps: added to the mean of squares.

    Raises:
        ValueError: if ``gain`` is unknown or ``eps`` not positive.
    """

    function = staticmethod(qk_norm_attention)
    per_head = ()
    own_logits: ClassVar = "it normalizes queries and keys"

    def __init__(self, spec: AttentionSpec, gain: Gain = "vector", eps: float = 1e-6) -> None:
        super().__init__(spec)
        size = 1 if check_choice("gain", gain, get_args(Gain)) == "scalar" else spec.head_dim
        self.before_rotation = gain == "vector"
        self.q_gain = nn.Parameter(torch.ones(size))
        self.k_gain = nn.Parameter(torch.ones(size))
        self.eps = check_number("eps", eps, above=0.0)

    def extra_repr(self) -> str:
        return f"gain={'scalar' if len(self.q_gain) == 1 else 'vector'!r}, eps={self.eps}"

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        return self.q_gain, self.k_gain, self.eps
