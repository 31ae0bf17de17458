"""Softmax over the last keys and the first ones (StreamingLLM: Xiao et al., ICLR 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attention_modules.base import State
from attention_modules.kernels import attend, check_dropout
from attention_modules.mechanism import AttentionSpec, register_mechanism
from attention_modules.mechanisms.linear.band import Band, past_tokens
from attention_modules.mechanisms.linear.stateful import StatefulMechanism
from attention_modules.mechanisms.shared.options import check_integer


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: int = 0,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    state: State | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """softmax(q_i·k_j · scale) v over the last ``window`` keys j <= i that are seen, and the first ``sinks`` of all.

    Time and memory are linear in the number of tokens: blocks of rows against the keys that they may see. Tokens that a
    mask hides do not count (our reading). Queries and keys keep the positions with which they were made, while the
    released code turns keys anew to their place in its cache.

    Args:
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        window: how many of the last keys a row sees, itself among them.
        sinks: how many of the first.
        attn_mask: of tokens that are seen, ``[B, 1, 1, N]``, or causal ``[B, 1, N, N]``.
        is_causal: whether to hide the future, which this must.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.
        state: of earlier tokens, empty before the first; it is filled with what stands for all tokens so far.
        starts: at which tokens a sequence of its own begins, boolean ``[B, N]``.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if the mask's dtype does not fit.
        ValueError: if a shape or number does not fit, or nothing hides the future.

    Example:
        >>> import torch
        >>> from attnswap.functional import window_attention
        >>> q, k, v = torch.randn(3, 1, 3, 50, 8)
        >>> window_attention(q, k, v, window=8, sinks=2, is_causal=True).shape
        torch.Size([1, 3, 50, 8])
    """
    check_sizes(window, sinks)
    check_dropout(dropout_p)
    tokens = past_tokens("window", attn_mask, is_causal, q, k)
    band = Band("window", k, v, window, sinks, tokens, starts, state)
    whole = q.shape[2] == 0 or (band.plain and not state and q.shape[2] <= window)
    if state is not None:
        band.write(state)
    if whole:
        return attend(*_alike(q, k, v), None, True, dropout_p, scale)
    queries, keys, values, seen = band.blocks(q)
    return band.whole(attend(*_alike(queries, keys, values), seen, False, dropout_p, scale))


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In one dtype, as a look at a call under autocast has queries and keys wider than values, and no autocast."""
    kind = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return q.to(kind), k.to(kind), v.to(kind)


def check_sizes(window: int, sinks: int = 0) -> None:
    """Check the numbers of keys that a row sees.

    Raises:
        ValueError: if ``window`` is below 1, or ``sinks`` below 0.
    """
    check_integer("window", window, at_least=1)
    check_integer("sinks", sinks, at_least=0)


@register_mechanism("window")
class WindowAttention(StatefulMechanism):
    """:func:`window_attention` as a mechanism: softmax for up to ``window`` tokens, a state of fixed size for more.

    Args:
        spec: the layer that it serves.
        window: how many of the last keys a row sees, itself among them; 512 as in the released code.
        sinks: how many of the first keys it sees beside, 4 as in the paper.

    Raises:
        ValueError: if a number is out of its limits.
    """

    function = staticmethod(window_attention)
    per_head = ()
    own_logits: ClassVar = "a row sees a window of the keys"
    neutral: ClassVar = {"window": 1024}

    def __init__(self, spec: AttentionSpec, window: int = 512, sinks: int = 4) -> None:
        super().__init__(spec)
        check_sizes(window, sinks)
        self.window, self.sinks = window, sinks

    def extra_repr(self) -> str:
        return f"window={self.window}, sinks={self.sinks}"

    def tensors(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> tuple[Any, ...]:
        return q, k, v, self.window, self.sinks
