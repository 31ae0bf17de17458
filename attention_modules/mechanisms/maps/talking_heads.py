"""Talking-heads attention: logits and weights are mixed across heads (Shazeer et al., 2020)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention_modules.base import TensorMechanism
from attention_modules.kernels import attend, without_autocast
from attention_modules.masks import combine_masks, hide, visible
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.shared.options import check_number


def talking_heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix_logits: Tensor,
    mix_weights: Tensor,
    bias_logits: Tensor | None = None,
    bias_weights: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """(Σ_h W_gh softmax(Σ_f L_hf q_f k_fᵀ · scale + l_h + mask) + w_g) v_g for each head g (Shazeer et al., 2020).

    The biases l and w are CaiT's (Touvron et al., 2021). Softmax takes no notice of l, whose gradient is zero; w is
    added to the weights of the keys that the row sees.

    Without a map in memory: the heads stand side by side as one of width H d, H times. It costs H times the products of
    plain attention.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        mix_logits: L ``[H, H]``.
        mix_weights: W ``[H, H]``.
        bias_logits: l ``[H]``; None for zeros.
        bias_weights: w ``[H]``; None for zeros.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout, of the weights before they are mixed.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d']``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import talking_heads_attention
        >>> q, k, v = torch.randn(3, 1, 3, 5, 8)
        >>> talking_heads_attention(q, k, v, torch.eye(3), torch.eye(3)).shape
        torch.Size([1, 3, 5, 8])
    """
    heads, width = q.shape[1], q.shape[-1]
    for name, mix in (("mix_logits", mix_logits), ("mix_weights", mix_weights)):
        if mix.shape != (heads, heads):
            raise ValueError(f"{name} must be [heads, heads] = {(heads, heads)}, got {tuple(mix.shape)}")
    for name, bias in (("bias_logits", bias_logits), ("bias_weights", bias_weights)):
        if bias is not None and bias.shape != (heads,):
            raise ValueError(f"{name} must be [heads] = {(heads,)}, got {tuple(bias.shape)}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
    scale = width**-0.5 if scale is None else scale
    if bias_logits is not None:
        mix_logits = mix_logits + 0 * bias_logits.unsqueeze(1)  # no Parameter goes without a gradient
    side_by_side = [x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (q, k, v)]  # [B, 1, N, H d]
    query = side_by_side[0] * mix_logits.repeat_interleave(width, 1).view(1, heads, 1, -1).to(q.dtype)
    key, value = (x.expand(-1, heads, -1, -1) for x in side_by_side[1:])
    short = query.shape[-1] - value.shape[-1]
    if short > 0:
        value = nn.functional.pad(value, (0, short))
    elif short < 0:
        query, key = (nn.functional.pad(x, (0, -short)) for x in (query, key))
    out = attend(query, key, value, hide(attn_mask), is_causal, dropout_p, scale)[..., : heads * v.shape[-1]]
    mixed = torch.einsum("gh,bhngd->bgnd", mix_weights.to(out.dtype), out.unflatten(-1, (heads, -1)))
    if bias_weights is None:
        return mixed
    with without_autocast(v.device):
        seen = _seen_values(v.to(torch.promote_types(v.dtype, torch.float32)), attn_mask, is_causal)
        return mixed + (bias_weights.view(-1, 1, 1).to(seen.dtype) * seen).to(out.dtype)


def _seen_values(v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The sum of the values that each row sees, ``[B, H, N|1, d']``."""
    if is_causal:
        return v.cumsum(-2)
    if attn_mask is None:
        return v.sum(-2, keepdim=True)
    return visible(attn_mask).to(v.dtype).expand(*attn_mask.shape[:-1], v.shape[-2]) @ v


@register_mechanism("talking_heads")
class TalkingHeadsAttention(TensorMechanism):
    """:func:`talking_heads_attention` as a mechanism, with two learned matrices, the identity at the start.

    Where the layer has matrices and biases of its own (CaiT), these are taken, and the mechanism has none.

    Args:
        spec: the layer that it serves.
        std: standard deviation of what is added to the identity at the start.

    Raises:
        ValueError: if ``std`` is negative, or given where the layer has matrices of its own.
    """

    function = staticmethod(talking_heads_attention)
    neutral: ClassVar = {"std": 0.0}
    own_logits: ClassVar = "it mixes them across heads"

    def __init__(self, spec: AttentionSpec, std: float = 0.0) -> None:
        super().__init__(spec)
        std = check_number("std", std, at_least=0.0)
        if spec.mixes_heads:
            if std > 0:
                raise ValueError(f"this layer mixes its heads by matrices of its own, which std={std} does not draw")
            return
        self.mix_logits, self.mix_weights = (
            nn.Parameter(torch.eye(spec.num_heads) + std * torch.randn(spec.num_heads, spec.num_heads))
            for _ in range(2)
        )

    def tensors(self, k: Tensor, mixers: tuple[Tensor, Tensor] | None = None) -> tuple[Any, ...]:
        return mixers or (self.mix_logits, self.mix_weights)
