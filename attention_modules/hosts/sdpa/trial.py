"""A layer that runs alone, on sequences that are made up: what it shows without an example of its model."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.sdpa.record import Record, known, parameters_of, recorded
from attention_modules.hosts.sdpa.seam import Place

_TOKENS = 6  # more than the heads of a small layer would hide a mistake of the axes
_WAYS = 9  # of giving sequences of different widths to a layer, that are tried


def tried(layer: nn.Module, widths: Sequence[int] = ()) -> Record:
    """The record of a layer that runs alone, once in a swap; empty where it needs more than sequences.

    Args:
        layer: any module.
        widths: of the sequences that it takes, where its linear layers do not tell them.
    """
    return next(iter(_trials(layer, widths)), Record())


def others_of(layer: nn.Module) -> tuple[Place, ...] | None:
    """The arguments that a layer makes its keys of, and not its queries; None if unknown."""
    found = [record.inside[layer][0].others(layer) for record in _trials(layer)]
    return tuple(dict.fromkeys(itertools.chain(*found))) if found else None


def with_values(layer: nn.Module) -> nn.Module:
    """A copy of a layer of the meta device, on the CPU, with values as good as any."""
    twin, drawn = copy.deepcopy(layer).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in (*twin.parameters(), *twin.buffers()):
            x.normal_(generator=drawn) if x.is_floating_point() else x.fill_(1)
    return twin


def _trials(layer: nn.Module, widths: Sequence[int] = ()) -> list[Record]:
    if layer not in (trials := known().trials):
        linear = (part.in_features for part in layer.modules() if isinstance(part, nn.Linear))
        trials[layer] = [*_all(layer, [*dict.fromkeys(widths or linear)])]
    return trials[layer]


def _all(layer: nn.Module, widths: list[int]) -> Iterator[Record]:
    """Calls with a sequence in each argument that needs one, then with one in another argument beside.

    Each argument has its own, so that it can be told what queries and keys are made of. Masks are left out.
    """
    like = next((p for p in layer.parameters() if p.is_floating_point()), None)
    if like is None:
        return
    named = [each for each in parameters_of(layer) if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    required = [each.name for each in named if each.default is each.empty]
    masks = {name: None for name in required if "mask" in name}
    needed = [name for name in required if name not in masks] or [each.name for each in named[:1]]
    more = [each.name for each in named if each.default is None and "mask" not in each.name and each.name not in needed]
    for names in (needed, *([*needed, name] for name in more)):
        for tried_widths in itertools.islice(itertools.product(widths, repeat=max(len(names), 1)), _WAYS):
            made = [_sequence(like, width, place) for place, width in enumerate(tried_widths)]
            given = {**dict(zip(names, made, strict=True)), **masks} if names else made
            with contextlib.suppress(Exception):  # whatever a stranger's forward raises
                record = recorded(layer, given)
                if _told(record.inside.get(layer, []), len(made)):
                    yield record
                    break


def _told(calls: Sequence[Any], sequences: int) -> bool:
    """Whether there was a call; what takes a second tensor for no sequence has a dimension too many."""
    return bool(calls) and (sequences < 2 or all(call.q.dim() <= 4 for call in calls))


def _sequence(like: Tensor, width: int, place: int) -> Tensor:
    x = torch.zeros(2, _TOKENS, width, device=like.device, dtype=like.dtype)
    if x.is_meta:
        return x
    return x + torch.linspace(-9 - place, 9, x.numel(), device=x.device).sin().view_as(x).to(x.dtype)
