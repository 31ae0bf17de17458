"""Attention by products of positive features, whose sums over the past are the state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_modules.mechanisms.linear.operator import linear_operator


def kernel_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    is_causal: bool,
    tokens: Tensor | None = None,
    starts: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j φ(q_i)·φ(k_j) v_j and Σ_j φ(q_i)·φ(k_j), over the past or over all tokens, and the state.

    Args:
        q, k: features ``[B, H, N, f]``.
        v: ``[B, H, N, d]``.
        log_decay: as :func:`.linear_operator` takes it; of causal sums alone.
        is_causal: whether the sums are over j <= i.
        tokens: which are there, boolean ``[B|1, H|1, N]``.
        starts: before which the sums begin anew, boolean ``[B|1, N]``.
        initial_state: sums over earlier tokens ``[B, H, f, d + 1]``.

    Returns:
        ``[B, H, N, d]`` and ``[B, H, N, 1]``, in at least float32, and the last state ``[B, H, f, d + 1]``.
    """
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    v = F.pad(v.to(wide), (0, 1), value=1.0)
    if is_causal:
        given = {"scale": 1.0, "tokens": tokens, "starts": starts, "initial_state": initial_state}
        out, state = linear_operator(q, k, v, log_decay, **given)  # type: ignore[arg-type]
    else:
        if tokens is not None:
            k, v = (x.masked_fill(~tokens[..., None], 0.0) for x in (k, v))
        state = k.to(wide).mT @ v
        out = q.to(wide) @ state
    return out[..., :-1], out[..., -1:], state


def ratio(sums: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """sums / total; zeros where nothing was summed."""
    return (sums / torch.where(total > 0, total, 1.0)).to(dtype)
