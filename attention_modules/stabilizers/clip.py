"""QK-clip: the weights of queries and keys shrink where a head's largest logit passes a limit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_modules.hosts import AttentionLayer
from attention_modules.hosts.weights import Rows, wrapped_by_peft


def clip_factors(largest: Tensor, tau: float, groups: int = 1) -> Tensor:
    """γ = min(1, tau / S), S the largest logit of any head that shares the key head.

    Where S is NaN or infinite γ is 1: the numbers that made it so are no reason to set weights to NaN or 0.

    Args:
        largest: the largest logit of each query head, ``[H]``.
        tau: limit, above 0.
        groups: query heads that share a key head.

    Returns:
        ``[H / groups]``.

    Example:
        >>> import torch
        >>> from attention_modules.stabilizers.clip import clip_factors
        >>> clip_factors(torch.tensor([50.0, 200.0, 400.0, 80.0]), tau=100.0, groups=2)
        tensor([0.5000, 0.2500])
    """
    largest = largest.view(-1, groups).amax(1)
    return torch.where(largest.isfinite() & (largest > tau), tau / largest, torch.ones_like(largest))


def clip_refusal(layer: AttentionLayer) -> str | None:
    """Why the scale of a layer's W_q and W_k is not that of its logits, or is not to be changed, if so."""
    host, module, mechanism = layer.host, layer.module, layer.mechanism
    if mechanism is not None and mechanism.own_logits:
        return f"the logits of {type(mechanism).__name__} are not q kᵀ: {mechanism.own_logits}"
    if norm := host.norm(module):
        return f"{norm}: the logits do not depend on the scale of W_q and W_k, which need no clip"
    if reason := host.weights_refusal(module):
        return reason
    for rows in _rows(layer):
        weight = getattr(rows.owner, rows.tensor)
        if wrapped_by_peft(rows.owner):
            return "its weights are sums with an adapter's: merge it (merge_and_unload())"
        if not isinstance(weight, nn.Parameter):
            return "its weights are computed at each call (a parametrization such as SigmaReparam, or pruning)"
        if not weight.requires_grad:
            return "its weights are frozen"
        if hasattr(weight, "full_tensor"):
            return "its weights are sharded (FSDP2): use DDP"
    return None


def scale_logits(layer: AttentionLayer, factors: Tensor, alpha: float = 0.5) -> None:
    """Multiply the logits of each key head by a factor γ: W_q, b_q by γ^alpha and W_k, b_k by γ^(1 - alpha), in place.

    A mechanism without a query has the logits k kᵀ: there W_k and b_k take γ^½. A factor of 1 changes no bit.

    Args:
        layer: one for which :func:`clip_refusal` has no reason.
        factors: one for each key head.
        alpha: the query's share, from 0 to 1.
    """
    groups, width = layer.host.groups(layer.module), layer.spec.head_dim
    query, key = layer.host.qk_rows(layer.module)
    query_bias, key_bias = layer.host.qk_biases(layer.module)
    mechanism = layer.mechanism
    if mechanism is not None and not mechanism.uses_query:
        alpha = 0.5
    else:
        by_feature = factors.pow(alpha).repeat_interleave(groups * width)
        for rows in (query, query_bias):
            if rows is not None:
                rows.scale(by_feature)
    by_feature = factors.pow(1 - alpha).repeat_interleave(width)
    for rows in (key, key_bias):
        if rows is not None:
            rows.scale(by_feature)


def _rows(layer: AttentionLayer) -> tuple[Rows, ...]:
    query, key = layer.host.qk_rows(layer.module)
    mechanism = layer.mechanism
    return (key,) if mechanism is not None and not mechanism.uses_query else (query, key)
