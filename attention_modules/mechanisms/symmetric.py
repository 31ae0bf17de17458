"""Symmetric attention: the keys ask the keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionMechanism, register_mechanism

P = ParamSpec("P")


def keys_and_values(name: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Decorator of a function of (k, v) that has a query refused, which would be taken for the keys.

    Args:
        name: the short name of the mechanism.
    """

    def decorate(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        label = getattr(function, "__name__", name)

        @functools.wraps(function)
        def of_keys_and_values(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            if len(args) > 2 or "q" in kwargs or "query" in kwargs:
                raise TypeError(
                    f"{label} takes (k, v), there is no query: its keys ask each other. Leave q out; what takes "
                    f"(q, k, v) is the mechanism, swap_attention(model, {name!r})"
                )
            return function(*args, **kwargs)

        return of_keys_and_values

    return decorate


def check_self_attention(name: str, q: Tensor, k: Tensor) -> None:
    """Check that queries and keys belong to the same tokens.

    Raises:
        ValueError: if their numbers differ, as they do with a key-value cache.
    """
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"{name} attention needs one query for each key, got {q.shape[-2]} queries and {k.shape[-2]} keys; "
            "run without a key-value cache (use_cache=False), and not as cross-attention"
        )


def keys_of_rows(name: str, q: Tensor, k: Tensor) -> Tensor:
    """What asks where keys ask each other: all keys, or ``q`` where it is fewer, the keys of new tokens.

    Raises:
        ValueError: if there are more queries than keys.
    """
    if q.shape[-2] < k.shape[-2]:
        return q
    check_self_attention(name, q, k)
    return k


@keys_and_values("symmetric")
def symmetric_attention(
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(k kᵀ · scale + mask) v (symmetric attention of Teo and Nguyen, NeurIPS 2024).

    Args:
        k: keys ``[B, H, N, d]``.
        v: values ``[B, H, N, d]``.
        attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, N]``.
        is_causal: row i sees keys 0 to i only.
        dropout_p: attention dropout.
        scale: factor on the logits, 1/sqrt(d) where None.

    Returns:
        ``[B, H, N, d]``; zeros in rows that see nothing.

    Raises:
        TypeError: if there is a query, or the mask's dtype does not fit.
        ValueError: if the mask's shape does not fit.

    Example:
        >>> import torch
        >>> from attnswap.functional import symmetric_attention
        >>> k, v = torch.randn(2, 1, 3, 5, 8)
        >>> symmetric_attention(k, v).shape
        torch.Size([1, 3, 5, 8])
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, k, k, scale)
    return attend(k, k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("symmetric")
class SymmetricAttention(AttentionMechanism):
    """:func:`symmetric_attention` as a mechanism: no query projection."""

    uses_query = False
    cache = "keys and values"
    per_head = ()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Mix the values by the likeness of keys.

        Of ``q`` only the length is read, but where a key-value cache holds more keys: there it is the keys of the new
        tokens.

        Raises:
            ValueError: if there are more queries than keys.
        """
        q = keys_of_rows("symmetric", q, k)
        attn_mask, is_causal = combine_masks(attn_mask, is_causal, q, k, scale)
        return attend(q, k, v, hide(attn_mask), is_causal, dropout_p, scale)
