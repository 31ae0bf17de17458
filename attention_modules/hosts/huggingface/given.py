"""What a layer hands to the attention interface beside queries, keys, values and a mask, and who can honor it.

A bias of positions and the indices of the keys that a row may see are masks. A bound on the logits and a further key
("sink") need a mechanism whose logits are q kᵀ: what the bound takes away is an additive mask too, and the sink a key
of zeros, whose logit stands in the mask, with a value of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attention_modules.masks import SINKS
from attention_modules.precision import scaled_logits

MASKS = ("position_bias", "indices")
OF_LOGITS = ("softcap", "s_aux", "sinks")
# What no mechanism is given: other code would have to choose the keys, or hold them.
UNSEEN = ("block_indices", "block_table")
# What changes nothing here: in the mask already, for other implementations, or about what is returned.
WITHOUT_EFFECT = (
    *("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("sliding_window", "position_ids", "cache", "use_cache", "output_attentions", "deterministic"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)


def given_of(arguments: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """Which of these arguments are there, and not None."""
    return [name for name in names if arguments.get(name) is not None]


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """What row i of queries ``[B, H, N, d]`` may see of as many keys: ``[1, 1, N, N]``."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()[None, None]


def with_masks(mask: Tensor | None, k: Tensor, arguments: Mapping[str, Any]) -> Tensor | None:
    """The mask with the bias of positions in it, and only those keys that are indexed.

    Args:
        mask: boolean or additive ``[B, 1 or H, N, M]``, or None.
        k: keys ``[B, H, M, d]``.
        arguments: ``position_bias``, ``[B or 1, H or 1, N, at least M]``; ``indices`` ``[B, N, top]`` of the keys.
    """
    indices, bias = arguments.get("indices"), arguments.get("position_bias")
    if indices is not None:
        seen = torch.zeros(*indices.shape[:2], k.shape[-2], dtype=torch.bool, device=k.device)
        mask = _both(seen.scatter(-1, indices.long(), True)[:, None], mask)
    if bias is not None:
        mask = _both(bias[..., : k.shape[-2]].to(k.dtype), mask)
    return mask


def _both(mask: Tensor, other: Tensor | None) -> Tensor:
    """What two masks hide and add together."""
    if other is None:
        return mask
    if mask.dtype == torch.bool:
        mask, other = other, mask
    if other.dtype != torch.bool:
        return mask + other
    return mask & other if mask.dtype == torch.bool else torch.where(other, mask, float("-inf"))


def bounded(mask: Tensor | None, q: Tensor, k: Tensor, scale: float | None, bound: float) -> Tensor:
    """A mask that takes from each logit what ``bound * tanh(logit / bound)`` lacks of it: ``[B, H, N, M]``."""
    logits = scaled_logits(q, k, scale)
    return _both((bound * torch.tanh(logits / bound) - logits).to(q.dtype), mask)


def with_key(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, keys and values with one more key, which takes its share of each row and gives zeros.

    Args:
        mask: boolean or additive, or None.
        q: queries ``[B, H, N, d]``.
        k: keys ``[B, H, M, d]``.
        v: values ``[B, H, M, d]``.
        logit: of the key, ``[H]`` or ``[B, H, N, 1]``.
    """
    full = _both(q.new_zeros(*q.shape[:-1], k.shape[-2]), mask)
    logit = logit.view(1, -1, 1, 1) if logit.dim() == 1 else logit
    mask = torch.cat([full, logit.to(q.dtype).expand(*q.shape[:-1], 1)], dim=-1)
    k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[-1])], dim=2) for x in (k, v))
    v.keys_without_value = 1  # type: ignore[attr-defined]  # its map is that of the keys before
    setattr(k, SINKS, 1)
    return mask, k, v
