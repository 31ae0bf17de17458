"""Whose keys a layer has: those of its own tokens, or of another sequence (cross-attention)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.sdpa.record import arguments, known
from attention_modules.hosts.sdpa.trial import tried

_SHOWN = "_whose_keys"  # in a module: whether it does, as an example showed, and the shapes of the last one
# Words in names of arguments that one sequence may be given to, beside the one that asks: key, keyStates, x_kv, K_in.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_KEYS = re.compile(r"x?(k|v|kv|keys?|values?)(x|s|in)?", re.IGNORECASE)
# A word among them that says whose they are: those of something else.
_ELSE = re.compile(r"enc(oder)?|mem(ory)?|con?te?xt|cross|cond(ition)?|ima?ge?|vision|visual|audio|text", re.IGNORECASE)

_Shapes = tuple[torch.Size, ...]


def whose(layer: nn.Module) -> tuple[bool, bool]:
    """Whether a layer's keys are of other tokens than its queries, and whether it was shown that they are not.

    A call of the model tells, else an earlier one, else a trial of the layer alone.
    """
    told = _by_calls(layer)
    told = _mark(layer)[0] if told is None else told
    return (_by_trial(layer), False) if told is None else (told, not told)


def keep_shown(layers: Iterable[nn.Module]) -> None:
    """Keep what the example that is known shows of plain layers, for when there is none."""
    for layer in layers if known().example is not None else ():
        if not isinstance(layer, Swapped):  # whose calls are the mechanism's
            told = _by_calls(layer)
            vars(layer)[_SHOWN] = _mark(layer)[0] if told is None else told, _shapes(known().example)


def would_show(layer: nn.Module, example: Any) -> bool:
    """Whether an example may tell of a plain layer what was not asked of it yet."""
    return _mark(layer)[1] != _shapes(arguments(example))


def _mark(layer: nn.Module) -> tuple[bool | None, _Shapes | None]:
    found: tuple[bool | None, _Shapes | None] = vars(layer).get(_SHOWN, (None, None))
    return found


def _shapes(example: Any) -> _Shapes:
    return tuple(x.shape for x in tree_leaves(example) if isinstance(x, Tensor))


def _by_calls(layer: nn.Module) -> bool | None:
    if not (calls := known().inside.get(layer)):
        return None
    if calls[0].is_cross or any(call.reads_another for call in calls[1:]):  # keys of a cache are no other sequence
        return True
    return False if calls[0].is_own else None


def _by_trial(layer: nn.Module) -> bool:
    """Whether it makes keys of an argument of its own, which is no part of a call with queries, keys and values."""
    calls = tried(layer).inside.get(layer)
    if not calls:
        return False
    call, given = calls[0], calls[0].given(layer)
    asking = call.seam(layer).asking
    width = None if asking is None else given[asking].shape[-1]
    return call.k.shape[-2] > call.q.shape[-2] or any(
        given[place].shape[-1] != width or not _may_be_its_own(place.name) for place in call.others(layer)
    )


def _may_be_its_own(name: str) -> bool:
    words = _WORDS.findall(name)
    return any(map(_KEYS.fullmatch, words)) and not any(map(_ELSE.fullmatch, words))
