"""A layer that runs alone, on sequences that are made up: what it shows without an example of its model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.sdpa.record import Record, known, parameters_of, recorded
from attention_modules.hosts.sdpa.seam import Place

_TOKENS = 6  # more than the heads of a small layer would hide a mistake of the axes
_WAYS = 9  # of giving sequences of different widths to a layer, that are tried
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MASK = re.compile(r"mask(s|ing)?(_|$)", re.IGNORECASE)


def tried(layer: nn.Module, widths: Sequence[int] = ()) -> Record:
    """The record of a layer that runs alone, once in a swap; empty where it needs more than sequences.

    Args:
        layer: any module.
        widths: of the sequences that it takes, where its linear layers do not tell them.
    """
    return next(_trials(layer, widths), Record())


def others_of(layer: nn.Module) -> tuple[tuple[Place, Place], ...] | None:
    """An argument that a layer makes its queries of, and one that it makes keys of alone, each; None if unknown."""
    calls = [record.inside[layer][0] for record in _trials(layer)]
    if not calls:
        return None
    asking = [(call, place) for call in calls if (place := call.seam(layer).asking) is not None]
    found = tuple(dict.fromkeys((place, other) for call, place in asking for other in call.others(layer)))
    unnamed = any(each.kind not in _NAMED for each in parameters_of(layer))
    return found or (None if unnamed else ())


def with_values(layer: nn.Module) -> nn.Module:
    """A copy of a layer of the meta device, on the CPU, with values as good as any."""
    twin, drawn = copy.deepcopy(layer).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in (*twin.parameters(), *twin.buffers()):
            x.normal_(generator=drawn) if x.is_floating_point() else x.fill_(1)
    return twin


def _trials(layer: nn.Module, widths: Sequence[int] = ()) -> Iterator[Record]:
    if layer not in (trials := known().trials):
        linear = (part.in_features for part in layer.modules() if isinstance(part, nn.Linear))
        trials[layer] = [], _all(layer, [*dict.fromkeys(widths or linear)])
    made, others = trials[layer]
    yield from made
    for record in others:
        made.append(record)
        yield record


def _all(layer: nn.Module, widths: list[int]) -> Iterator[Record]:
    """Calls with a sequence in each argument that needs one, then with one in another argument beside.

    Each argument has its own, so that it can be told what queries and keys are made of. Masks are left out.
    """
    parameters = parameters_of(layer)
    named = [each for each in parameters if each.kind in _NAMED]
    required = [each.name for each in named if each.default is each.empty]
    masks = {name: None for name in required if _MASK.search(name)}
    names = [name for name in required if name not in masks]
    placed = sum(each.kind is each.POSITIONAL_ONLY and each.default is each.empty for each in parameters)
    if not placed and not names:
        by_name = named and all(each.kind is not each.VAR_POSITIONAL for each in parameters)
        names, placed = ([named[0].name], 0) if by_name else ([], 1)
    more = [each.name for each in named if each.default is None and each.name not in names]
    for beside in ([], *([name] for name in more if not _MASK.search(name))):
        for given in _ways(layer, widths, placed + len(names) + len(beside)):
            by_their_names = dict(zip([*names, *beside], given[placed:], strict=True))
            if record := _run(layer, given[:placed], {**masks, **by_their_names}):
                yield record
                break


def _ways(layer: nn.Module, widths: list[int], count: int) -> Iterator[tuple[Tensor, ...]]:
    """So many sequences, of the same width first; last, one that stands in each place."""
    like = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if like is None:
        return
    for chosen in itertools.islice(itertools.product(widths, repeat=count), _WAYS):
        yield tuple(_sequence(like, width, place) for place, width in enumerate(chosen))
    if count > 1:
        yield from ((_sequence(like, width, 0),) * count for width in widths[:1])


def _run(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Record | None:
    """The record of a call; None where the layer does not take it, or takes a second tensor for no sequence."""
    with contextlib.suppress(Exception):  # whatever a stranger's forward raises
        record = recorded(layer, args, kwargs)
        calls = record.inside.get(layer, [])
        alone = len(args) + sum(each is not None for each in kwargs.values()) < 2
        if calls and (alone or all(call.q.dim() <= 4 for call in calls)):  # what is none adds a dimension
            return record
    return None


def _sequence(like: Tensor, width: int, place: int) -> Tensor:
    x = torch.zeros(2, _TOKENS, width, device=like.device, dtype=like.dtype)
    if x.is_meta:
        return x
    return x + torch.linspace(-9 - place, 9, x.numel(), device=x.device).sin().view_as(x).to(x.dtype)
