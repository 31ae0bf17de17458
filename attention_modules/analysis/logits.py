"""The largest logit of each head, and a bound on it that needs no product of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.analysis.chunks import ChunkedLogits, check_shapes, split_mask
from attention_modules.kernels import without_autocast


def largest_logit(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    counting: Tensor | None = None,
) -> Tensor:
    """max_ij scale · q_i·k_j over the pairs that may see each other: S_max of QK-clip (Kimi K2, 2025).

    Logits grow without bound where training is about to diverge. What an additive mask adds is left out, since no
    weight of queries or keys makes it; what it hides is hidden. Some rows of the map at a time, without gradients.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.
        counting: which rows count, boolean ``[B, N]``; all where None.

    Returns:
        ``[B, H]``, at least fp32; -inf where no row of a head sees a key, NaN where a visible pair holds NaN.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import torch
        >>> from attnswap.analysis import largest_logit
        >>> largest_logit(torch.ones(1, 2, 5, 4), 3 * torch.ones(1, 2, 5, 4))  # 4 · 3 / sqrt(4)
        tensor([[6., 6.]])
    """
    check_shapes(q, k, attn_mask)
    with torch.no_grad(), without_autocast(q.device):
        visible, _ = split_mask(attn_mask)
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = ChunkedLogits(q.to(dtype), k.to(dtype), visible, None, is_causal, _scale(q, scale))
        rows = torch.cat([chunk.amax(-1) for chunk in logits.chunks()], -1)
        return (rows if counting is None else rows.masked_fill(~counting[:, None], float("-inf"))).amax(-1)


@torch.no_grad()
def logit_bound(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """``|scale| · max_i ‖q_i‖ · max_j ‖k_j‖`` of each head, at least the largest logit, in O(N d).

    Args:
        q, k, scale: as :func:`largest_logit`.

    Returns:
        fp32 ``[B, H]``.

    Example:
        >>> import torch
        >>> from attnswap.analysis import logit_bound
        >>> logit_bound(torch.ones(1, 2, 5, 4), -torch.ones(1, 2, 5, 4))  # of logits of -2
        tensor([[2., 2.]])
    """
    norms = [x.float().square().sum(-1).amax(-1) for x in (q, k)]
    return abs(_scale(q, scale)) * (norms[0] * norms[1]).sqrt()


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
