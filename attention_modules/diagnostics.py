"""What Principal Attention Pursuit does pass by pass: whether its sparse part fills, and whether it saturates."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_modules.kernels import attend, without_autocast
from attention_modules.masks import combine_masks, hide, seen_tokens
from attention_modules.mechanisms.pursuit import clip, pass_inputs
from attention_modules.mechanisms.rpc import (
    Threshold,
    check_rpc_options,
    check_rpc_shapes,
    pursuit_threshold,
    visible_norm,
)
from attention_modules.precision import scaled_logits

ROWS_AT_ONCE = 256


@torch.no_grad()
def rpc_diagnostics(
    k: Tensor,
    v: Tensor,
    *,
    iterations: int = 4,
    lam: float | None = None,
    threshold: Threshold = "released",
    num_heads: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> dict[str, Tensor]:
    """What each pass of :func:`attention_modules.rpc_attention` does, whose arguments these are.

    Self-probability near 1 and entropy near 0 mean that the iteration saturates: gradients vanish with it,
    and robustness to gradient attacks may then be masking. Computed with autocast off.

    Returns:
        ``[iterations, B, H]`` each, float32 (float64 for float64 keys): ``"sparsity"``, share of non-zero
        entries of S; ``"residual"``, ‖k - L - S‖/‖k‖ (0 for zero keys); ``"entropy"`` of a row of attention,
        nats; ``"self_probability"``, what a row gives to itself. Of all passes together, ``[B, H]``:
        ``"mean_abs_key"``, the mean absolute value of k over the keys that a row sees; ``"threshold"``, t, above
        which an entry goes into S (inf where lam is inf, or all keys are 0). All are of the tokens that some row sees
        (padding counts in none), and all but the first two are means over those that see something.

    Raises:
        TypeError, ValueError: as :func:`attention_modules.rpc_attention`.
    """
    check_rpc_options(iterations, lam, threshold)
    check_rpc_shapes(k, v)
    k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, k, k, scale)
    attn_mask = hide(attn_mask)
    seen = seen_tokens(attn_mask, k, k)
    tokens = k.new_ones(1, 1, 1, 1, dtype=torch.bool) if seen is None else seen[:, None, :, None]
    with without_autocast(k.device):
        limit = pursuit_threshold(k, lam, threshold, attn_mask, is_causal, num_heads)
        total, count = visible_norm(k, attn_mask, is_causal)
        some = (count > 0) & tokens
        once = {
            "mean_abs_key": _mean_of_rows(total / (count * k.shape[-1]), some, k),
            "threshold": _mean_of_rows(k.new_tensor(torch.inf) if limit is None else limit, some, k),
        }
        low_ranks: list[Tensor] = []
        rows: dict[str, list[Tensor]] = {"sparsity": [], "residual": [], "entropy": [], "self_probability": []}
        norm = _norm(k, tokens)
        norm = norm.masked_fill(norm == 0, torch.inf).where(tokens.any((-2, -1)), torch.nan)
        for raw, query in pass_inputs(k, limit, iterations, low_ranks):
            low_ranks.append(attend(query, query, v, attn_mask, is_causal, 0.0, scale))
            sparse = raw - clip(raw, limit)
            rows["sparsity"].append(_mean_of_rows((sparse != 0).to(k.dtype).mean(-1, keepdim=True), tokens, k))
            rows["residual"].append(_norm(k - low_ranks[-1] - sparse, tokens) / norm)
            entropy, own = map_statistics(query, attn_mask, is_causal, scale, seen)
            rows["entropy"].append(entropy)
            rows["self_probability"].append(own)
    return {name: torch.stack(passes) for name, passes in rows.items()} | once


def _norm(values: Tensor, tokens: Tensor) -> Tensor:
    """The norm ``[B, H]`` of the rows of these tokens."""
    return torch.linalg.vector_norm(values.where(tokens, 0.0), dim=(-2, -1))


def _mean_of_rows(values: Tensor, some: Tensor, k: Tensor) -> Tensor:
    """Mean ``[B, H]`` over some rows of values; both are broadcastable to ``[B, H, N, 1]``."""
    some = some.expand(*k.shape[:-1], 1)
    return values.expand_as(some).where(some, 0.0).sum((-2, -1)) / some.sum((-2, -1))


def map_statistics(
    query: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, counting: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean entropy and self-probability ``[B, H]`` of softmax(q qᵀ · scale), some rows of the map at a time.

    ``counting``: which rows count, boolean ``[B, N]``; all where None.
    """
    tokens = query.shape[-2]
    places = torch.arange(tokens, device=query.device)
    totals = [query.new_zeros(query.shape[:2]) for _ in range(3)]  # entropy, self-probability, rows
    for here in places.split(ROWS_AT_ONCE):
        logits = scaled_logits(query[..., here, :], query, scale)  # [B, H, rows, N]
        if is_causal:
            logits = logits.masked_fill(places > here[:, None], float("-inf"))
        if attn_mask is not None:
            part = attn_mask[..., here, :] if attn_mask.shape[-2] > 1 else attn_mask
            logits = logits.masked_fill(~part, float("-inf")) if part.dtype == torch.bool else logits + part
        some = (logits != float("-inf")).any(-1)
        some = some if counting is None else some & counting[:, None, here]
        weights = logits.softmax(-1).masked_fill(~some.unsqueeze(-1), 0.0)  # 0/0 in rows that see nothing
        own = weights.gather(-1, here[:, None].expand(*weights.shape[:-1], 1)).squeeze(-1)
        for total, value in zip(totals, (torch.special.entr(weights).sum(-1), own, some), strict=True):
            total += value.sum(-1)
    return totals[0] / totals[2], totals[1] / totals[2]
