"""The entropy of attention as a penalty: differentiable, on fused attention, without a map in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.analysis.chunks import ChunkedLogits
from attention_modules.analysis.kernels import lse_and_mean_key
from attention_modules.kernels import attend, recomputed, without_autocast
from attention_modules.masks import combine_masks, visible
from attention_modules.mechanisms.shared.acting import once
from attention_modules.mechanisms.shared.chunks import CHUNK
from attention_modules.mechanisms.shared.options import check_integer

# So low that p is 0, and finite, as p ln p is then: no second mask is needed. Times a gradient scaler's scale, too.
_HIDDEN = -1e15


def row_entropy(
    q: Tensor, k: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """H_i = -Σ_j A_ij ln A_ij of A = softmax(scale · q kᵀ + mask), in nats, with gradients for queries and keys.

    H_i = lse_i - scale · q_i·(A K)_i. One more key, whose logit is a detached estimate s of lse_i and whose value is an
    indicator, gives p = σ(s - lse_i) beside A K in one fused pass, and so lse_i = s - logit(p) with its gradient. Few
    rows (64) are summed over as they are; many, where an additive mask adds to logits, some at a time, and again in the
    backward pass.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
        is_causal: row i sees keys 0 to i only.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N]``, at least float32; 0 in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.entropy import row_entropy
        >>> q, k = torch.randn(2, 1, 3, 5, 8)  # a batch of one, three heads, five tokens of width 8
        >>> row_entropy(q * 0, k)[0, 0].exp()  # uniform attention
        tensor([5., 5., 5., 5., 5.])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        q, k = q.to(dtype) * scale, k.to(dtype)
        if q.shape[-2] <= CHUNK // 2:
            return _of_rows(q, k, attn_mask, is_causal)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            if not _only_hides(attn_mask):
                return _in_chunks(q, k, attn_mask)
            attn_mask = visible(attn_mask)
        return _fused(q, k, attn_mask, is_causal)


def _only_hides(attn_mask: Tensor) -> bool:
    """Whether an additive mask adds nothing; on other devices than the CPU, nobody waits to know."""
    if attn_mask.requires_grad:  # a learned bias that is zero now
        return False
    return attn_mask.device.type == "cpu" and not bool(attn_mask.masked_fill(~visible(attn_mask), 0.0).any())


def _fused(q: Tensor, k: Tensor, seen: Tensor | None, is_causal: bool) -> Tensor:
    """Of queries that hold the scale."""
    if seen is not None:
        seen = seen.expand(*seen.shape[:-1], k.shape[-2])
    some = torch.ones((), dtype=torch.bool, device=q.device) if seen is None else seen.any(-1)  # rows that see a key
    guess = torch.where(some, _log_sum_exp(q.detach(), k.detach(), seen, is_causal), 0.0).unsqueeze(-1)
    # The further key is the first, so that causal rows see it; under causality a further row takes its place.
    query = F.pad(torch.cat([q, guess], -1), (0, 0, int(is_causal), 0))
    key = F.pad(torch.cat([k, torch.zeros_like(k[..., :1])], -1), (0, 0, 1, 0))
    indicator = torch.zeros_like(key)
    indicator[..., 0, -1] = 1.0
    mask = None if seen is None else F.pad(seen, (1, 0), value=True)
    out = attend(query, key + indicator, key + indicator, mask, is_causal, 0.0, 1.0)[..., int(is_causal) :, :]
    share = torch.where(some, out[..., -1], 0.5)
    lse = guess.squeeze(-1) - torch.logit(share)
    mean_logit = (q * out[..., :-1]).sum(-1) / (1 - share)
    return torch.where(some, lse - mean_logit, 0.0)


@torch.no_grad()
def _log_sum_exp(q: Tensor, k: Tensor, seen: Tensor | None, is_causal: bool) -> Tensor:
    found = lse_and_mean_key(q, k, seen, is_causal, 1.0)
    if found is not None:
        return found[0].to(q.dtype)
    return torch.cat([part.logsumexp(-1) for part in ChunkedLogits(q, k, seen, None, is_causal, 1.0).chunks()], -1)


def _in_chunks(q: Tensor, k: Tensor, attn_mask: Tensor) -> Tensor:
    found = []
    for first in range(0, q.shape[-2], CHUNK):
        mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., first : first + CHUNK, :]
        part = q[..., first : first + CHUNK, :]
        found.append(recomputed(_of_rows, part, k, mask))
    return torch.cat(found, -1)


def _of_rows(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """From the logits of all these rows."""
    logits = (k @ q.mT).mT.contiguous()  # in this order the gradient of the keys lies in memory as they do
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        return _entropy(logits)
    seen = visible(attn_mask)
    if attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.to(q.dtype).masked_fill(~seen, 0.0)
    entropy = _entropy(logits.masked_fill(~seen, _HIDDEN))
    return torch.where(seen.expand_as(logits).any(-1), entropy, 0.0)


def _entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def entropy_penalty(
    q: Tensor,
    k: Tensor,
    *,
    floor: float | None = None,
    target: float | None = None,
    max_rows: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    counting: Tensor | None = None,
) -> Tensor:
    """Σ over heads of the mean over samples of max(0, floor - h)², or of (h - target)².

    h is the mean of H_i / ln n_i over the rows of a head that see n_i ≥ 2 keys: 0 where each attends to one key, 1
    where attention is uniform. The form is our reading of an entropy regularizer.

    Args:
        q, k, attn_mask, is_causal, scale: as :func:`row_entropy`.
        floor: what h should not fall below, from 0 to 1; or
        target: what h should be.
        max_rows: more rows than these are looked at in so many that lie evenly from the first to the last; one is the
            last.
        counting: which rows count, boolean ``[B, N]``; all where None. ``max_rows`` are of these.

    Returns:
        A scalar; 0 where no row sees two keys.

    Raises:
        ValueError: if both or neither of ``floor`` and ``target`` are given, ``max_rows`` is below 1, or shapes do not
            fit.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.entropy import entropy_penalty
        >>> q, k = torch.randn(2, 1, 3, 5, 8)
        >>> entropy_penalty(q * 0, k, floor=0.5)  # uniform attention is above every floor
        tensor(0.)
    """
    if max_rows is not None:
        check_integer("max_rows", max_rows, at_least=1)
    if (floor is None) == (target is None):
        raise ValueError(f"give one of floor and target, got floor={floor!r} and target={target!r}")
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k)
    number, columns = q.shape[-2], k.shape[-2]
    if max_rows is not None and number > max_rows:
        kept = _some_rows(number, max_rows, q.device, counting)[:, None, :, None]  # of each sample, where these differ
        q = q.take_along_dim(kept, -2)
        if counting is not None:
            counting = counting.take_along_dim(kept[:, 0, :, 0], -1) & once(kept[:, 0, :, 0])
        if is_causal:
            attn_mask, is_causal = torch.arange(columns, device=q.device) <= kept, False
        elif attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask.take_along_dim(kept, -2)
    seen = None if attn_mask is None else visible(attn_mask)
    count = ChunkedLogits(q, k, seen, None, is_causal, 1.0).visible_counts().expand(q.shape[:-1])
    rows = row_entropy(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    several = count >= 2 if counting is None else (count >= 2) & counting[:, None]
    rows = torch.where(several, rows / count.clamp(min=2).to(rows.dtype).log(), 0.0)
    normalized = rows.sum(-1) / several.sum(-1).clamp(min=1)
    miss = normalized - target if target is not None else F.relu(floor - normalized)  # type: ignore[operator]
    counted = several.any(-1)
    return (torch.where(counted, miss.square(), 0.0).sum(0) / counted.sum(0).clamp(min=1)).sum()


def _some_rows(number: int, wanted: int, device: torch.device, counting: Tensor | None) -> Tensor:
    """So many rows of a map, evenly from the first to the last; one is the last, as a causal first row sees one key.

    Of those that count, boolean ``[B, N]``, where these are known: the last several times where they are fewer.
    """
    index = torch.arange(wanted, device=device).unsqueeze(0)
    count = torch.full((1, 1), number, device=device) if counting is None else counting.sum(-1, keepdim=True)
    evenly = index * (count - 1) // (wanted - 1) if wanted > 1 else index + count - 1
    place = torch.where(count > wanted, evenly, torch.minimum(index, count - 1)).clamp(min=0)
    if counting is None:
        return place
    return torch.searchsorted(counting.cumsum(-1), place + 1).clamp(max=number - 1)
