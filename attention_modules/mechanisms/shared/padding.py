"""Masks of mechanisms that compare all keys with each other, so that rows cannot see different ones."""

from __future__ import annotations

from torch import Tensor

from attention_modules.masks import check_mask, hide
from attention_modules.mechanism import AttentionSpec


def padding_alone(name: str, attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask of padding, boolean or with -inf where it hides, as ``[B|1, H|1, 1, M|1]``.

    Raises:
        TypeError: if its dtype does not fit.
        ValueError: if its shape does not fit, or it tells rows apart.
    """
    check_mask(attn_mask, q, k)
    if attn_mask is None:
        return None
    if attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
        raise ValueError(
            f"{name} attention compares all keys with each other, so it takes masks of padding alone, [B, 1, 1, N], "
            f"got {tuple(attn_mask.shape)}"
        )
    return hide(attn_mask.view((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)))


def refuse_causal(name: str, spec: AttentionSpec) -> None:
    """Refuse a layer that hides the future.

    Raises:
        ValueError: if it does.
    """
    if spec.is_causal:
        raise ValueError(
            f"{name} attention compares all keys with each other, and this layer hides the future; choose another"
        )


def refuse_causality(name: str, is_causal: bool) -> None:
    """Refuse a call that hides the future.

    Raises:
        ValueError: if it does.
    """
    if is_causal:
        raise ValueError(f"{name} attention compares all keys with each other: it cannot be causal")
