"""Symmetric attention: the keys ask the keys."""

from __future__ import annotations

from torch import Tensor

from attention_modules.kernels import attend
from attention_modules.masks import combine_masks, hide
from attention_modules.mechanism import AttentionMechanism, register_mechanism


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
        TypeError, ValueError: if the mask's dtype or shape does not fit.
    """
    attn_mask, is_causal = combine_masks(attn_mask, is_causal, k, k, scale)
    return attend(k, k, v, hide(attn_mask), is_causal, dropout_p, scale)


@register_mechanism("symmetric")
class SymmetricAttention(AttentionMechanism):
    """:func:`symmetric_attention` as a mechanism: no query projection."""

    uses_query = False

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
        """Mix the values by the likeness of keys; of ``q`` only the length is read.

        Raises:
            ValueError: if the numbers of queries and keys differ.
        """
        check_self_attention("symmetric", q, k)
        return symmetric_attention(k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
