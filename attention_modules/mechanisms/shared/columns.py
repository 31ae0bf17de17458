"""Exact terms of the logits on fused attention: a bias per key as further columns of queries and keys.

With q' = [q · scale, 1], k' = [k, b] and values padded to their width, scaled dot-product attention at scale 1 has the
logits q kᵀ · scale + b, and the gradient of b, for which a mask would leave the fused kernels. In half precision, which
would round q · scale, it is q' = [q, 1] and k' = [k, b / scale] at that scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.kernels import attend, autocast

_UNIT = 16.0  # of the columns in float16, which holds no number beyond 65,504
_COARSE = 2.0**15  # of the first of these columns, which takes what the others do not hold
_WIDTH = 8  # PyTorch's fused kernels on CUDA take widths that are multiples of this


def _columns(bias: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """Addends in ``dtype`` and their factors, whose products sum to the bias: several where ``dtype`` rounds one.

    A bias that float16 does not hold in any such sum, beyond 2e9, counts as the largest that it does.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return [bias.to(dtype)], [1.0]
    if dtype == torch.bfloat16:
        found, factors, rest = [], [1.0, 1.0, 1.0], bias
    else:
        largest = torch.finfo(dtype).max
        # Whole numbers, 0 for most biases; without a gradient, which this unit would make infinite.
        found = [(bias.detach() / _COARSE).trunc().clamp(-largest, largest).to(dtype)]
        factors = [_COARSE, _UNIT, _UNIT]
        rest = ((bias - _COARSE * found[0].to(bias.dtype)) / _UNIT).clamp(-largest, largest)
    while len(found) < len(factors):
        found.append(rest.to(dtype))
        rest = rest - found[-1].to(rest.dtype)
    return found, factors


def attend_with_key_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale + bias + mask) v, without a map in memory.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        bias: one number per key, ``[B, H, M]``, finite; float32 where the inputs are of half precision.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``; not together with ``is_causal``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on q kᵀ, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d']``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = autocast(q), autocast(k), autocast(v)
    outside = scale if scale > 0 and k.dtype in (torch.bfloat16, torch.float16) else 1.0
    columns, factors = _columns(bias / outside, k.dtype)
    key = torch.cat([k, *(column.unsqueeze(-1) for column in columns)], -1)
    inner = q if outside == scale else q * scale
    query = torch.cat([inner, *(q.new_full((*q.shape[:-1], 1), factor) for factor in factors)], -1)
    width = -(-max(key.shape[-1], v.shape[-1]) // _WIDTH) * _WIDTH if key.is_cuda else max(key.shape[-1], v.shape[-1])
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, v))
    return attend(query, key, value, attn_mask, is_causal, dropout_p, outside)[..., : v.shape[-1]]


def attend_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention with one more key before the others, of a given logit and the value 0, without a map in memory.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d']``.
        sink: the logit of that key in each head, ``[H]``.
        attn_mask: boolean or additive, broadcastable to ``[B, H, N, M]``; not together with ``is_causal``. It says
            nothing of the sink, which every row sees.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on q kᵀ, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d']``; zeros in rows that see nothing but the sink.
    """
    zeros = k.new_zeros(*k.shape[:2], 1, k.shape[-1])
    bias = F.pad(sink.view(1, -1, 1).expand(k.shape[0], -1, 1), (0, k.shape[-2]))
    if attn_mask is not None:
        seen: float | bool = True if attn_mask.dtype == torch.bool else 0.0
        attn_mask = F.pad(attn_mask.expand(*attn_mask.shape[:-1], k.shape[-2]), (1, 0), value=seen)
    k = torch.cat([zeros, k], -2)
    v = F.pad(v, (0, 0, 1, 0))
    if is_causal:  # row i sees the sink and keys 0 to i: one row more, which sees the sink alone
        q = F.pad(q, (0, 0, 1, 0))
    out = attend_with_key_bias(q, k, v, bias, attn_mask, is_causal, dropout_p, scale)
    return out[..., 1:, :] if is_causal else out
