"""QK-clip: the weights of queries and keys shrink where a head's largest logit passes a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from attention_modules.hosts import AttentionLayer
from attention_modules.hosts.weights import Rows, computes_more, wrapped_by_peft

_Feature = tuple[int, int]  # a Parameter's id, and a position along its features


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


def clip_refusal(layer: AttentionLayer, frozen: bool = False) -> str | None:
    """Why the scale of a layer's W_q and W_k is not that of its logits, or is not to be changed, if so.

    Args:
        layer: the layer.
        frozen: whether frozen weights are no reason.
    """
    host, module, mechanism = layer.host, layer.module, layer.mechanism
    if mechanism is not None and mechanism.own_logits:
        return f"the logits of {type(mechanism).__name__} are not q kᵀ: {mechanism.own_logits}"
    if norm := host.norm(module):
        return f"{norm}: the logits do not depend on the scale of W_q and W_k, which need no clip"
    if reason := host.weights_refusal(module):
        return reason
    for rows, *_ in _sides(layer):
        if wrapped_by_peft(rows.owner):
            return "its weights are sums with an adapter's: merge it (merge_and_unload())"
        if more := computes_more(rows.owner, rows.tensor):
            return more
        weight = getattr(rows.owner, rows.tensor)
        if not isinstance(weight, nn.Parameter):
            return "its weights are computed at each call (a parametrization such as SigmaReparam, or pruning)"
        if not (weight.requires_grad or frozen):
            return "its weights are frozen"
        if hasattr(weight, "full_tensor"):
            return "its weights are sharded (FSDP2): use DDP"
    return None


def query_key_weights(layer: AttentionLayer) -> list[nn.Parameter]:
    """W_q and W_k of a layer, without biases; one Parameter may be both, and where there is no query, W_k alone.

    Raises:
        ValueError: if one is computed at each call.
    """
    return layer.parameters_of(*(rows for rows, *_ in _sides(layer)))


def query_key_rows(layer: AttentionLayer) -> list[Rows]:
    """All that a clip of a layer multiplies: the rows of W_q, W_k and their biases."""
    return [rows for side in _sides(layer) for rows in side]


def shared_elsewhere(model: nn.Module, layers: Sequence[AttentionLayer]) -> dict[str, str]:
    """Layers whose query's or key's weights act elsewhere in a model too, each with the reason not to scale them.

    What the queries and keys of these layers share among each other is no reason.
    """
    own = {(id(rows.owner), rows.tensor) for layer in layers for rows in query_key_rows(layer)}
    others: dict[int, str] = {}
    for name, module in model.named_modules():
        for tensor, value in module._parameters.items():
            if value is not None and (id(module), tensor) not in own:
                others.setdefault(id(value), f"{name}.{tensor}".lstrip("."))
    found: dict[str, str] = {}
    for layer in layers:
        for rows in query_key_rows(layer):
            if other := others.get(id(getattr(rows.owner, rows.tensor))):
                reason = f"its {rows.tensor} is {other!r} too: choose all attention layers that share it, or none"
                found.setdefault(layer.name, reason)
    return found


class LogitScaler:
    """Multiplies each key head's logits by a factor γ: W_q, b_q by γ^alpha and W_k, b_k by γ^(1 - alpha), in place.

    A mechanism without a query has the logits k kᵀ: there W_k and b_k take γ^½, as does a weight that is both W_q and
    W_k of a head. What several heads share is multiplied once, by the smallest of the factors that they ask for. A
    factor of 1 changes no bit.

    Args:
        layers: those for which :func:`clip_refusal` has no reason.
        alpha: the query's share, from 0 to 1.
    """

    def __init__(self, layers: Sequence[AttentionLayer], alpha: float = 0.5) -> None:
        heads: list[int] = []  # of each side (queries or keys of a head): the key head, counted over all layers
        shares: list[float] = []  # of each side: the exponent of its factor
        parts: list[tuple[Rows, dict[_Feature, int]]] = []  # what is multiplied, and the side of each feature
        count = 0
        for layer in layers:
            sides, of_layer = _sides(layer), layer.spec.num_heads // layer.host.groups(layer.module)
            for side, share in zip(sides, (alpha, 1 - alpha) if len(sides) == 2 else (0.5,), strict=True):
                for rows in side:
                    tensor, positions = id(getattr(rows.owner, rows.tensor)), rows.features()
                    width = len(positions) // of_layer
                    parts.append((rows, {(tensor, at): len(heads) + i // width for i, at in enumerate(positions)}))
                heads += range(count, count + of_layer)
                shares += [share] * of_layer
            count += of_layer
        unit = _units(len(heads), [part for _, part in parts])
        both = Counter(zip(heads, unit, strict=True))  # queries and keys of a head in one unit: 2
        of_side = zip(heads, unit, shares, strict=True)
        shares = [0.5 if both[head, of] == 2 else share for head, of, share in of_side]
        self._index = torch.tensor([heads, unit])
        self._shares = torch.tensor(shares, dtype=torch.float64)
        self._parts: list[tuple[Rows, Tensor]] = []
        done: set[_Feature] = set()
        for rows, part in parts:
            if part.keys() - done:  # the last factor is 1, for features that an earlier part has multiplied
                self._parts.append((rows, torch.tensor([-1 if at in done else unit[of] for at, of in part.items()])))
                done |= part.keys()

    @torch.no_grad()
    def scale(self, factors: Sequence[Tensor]) -> Tensor:
        """Multiply.

        Args:
            factors: of each layer, one for each key head.

        Returns:
            Which key heads took a factor below 1, those of all layers in one tensor.
        """
        asked = torch.cat(list(factors))
        if self._index.device != asked.device:
            self._index, self._shares = self._index.to(asked.device), self._shares.to(asked.device)
            self._parts = [(rows, units.to(asked.device)) for rows, units in self._parts]
        heads, unit = self._index
        taken = asked.new_ones(len(heads) + 1)
        taken.scatter_reduce_(0, unit, asked[heads].pow(self._shares.to(asked)), "amin")
        for rows, units in self._parts:
            rows.scale(taken[units])
        return torch.ones_like(asked).scatter_reduce_(0, heads, taken[unit], "amin") < 1


def _units(number: int, parts: Sequence[Mapping[_Feature, int]]) -> list[int]:
    """For each of so many sides the first side that must take the same factor, as they share features."""
    parent = list(range(number))

    def first(side: int) -> int:
        while parent[side] != side:
            side = parent[side]
        return side

    holder: dict[_Feature, int] = {}
    for part in parts:
        for feature, side in part.items():
            one, other = first(side), first(holder.setdefault(feature, side))
            parent[max(one, other)] = min(one, other)
    return [first(side) for side in range(number)]


def scale_logits(layer: AttentionLayer, factors: Tensor, alpha: float = 0.5) -> None:
    """Multiply the logits of each key head of one layer by a factor: see :class:`LogitScaler`.

    Args:
        layer: one for which :func:`clip_refusal` has no reason.
        factors: one for each key head.
        alpha: the query's share, from 0 to 1.
    """
    LogitScaler([layer], alpha).scale([factors])


def _sides(layer: AttentionLayer) -> list[list[Rows]]:
    """The weight and the bias, if any, of the queries, if the mechanism has some, and of the keys."""
    rows, biases = layer.host.qk_rows(layer.module), layer.host.qk_biases(layer.module)
    sides = [[weight, *([] if bias is None else [bias])] for weight, bias in zip(rows, biases, strict=True)]
    mechanism = layer.mechanism
    return sides[1:] if mechanism is not None and not mechanism.uses_query else sides
