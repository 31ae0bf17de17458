"""Which layers attend to another sequence than their own: cross-attention.

What a forward says comes first; where it may be called either way, the names of a layer and of what is around it say.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.huggingface.projections import separate
from attention_modules.hosts.huggingface.source import InterfaceCall, arguments_at, interface_call

_OTHER_QUERY = re.compile(r"Cross|Att(entio)?n\w*Pool")  # in the class of a layer or around it
_NAMED = re.compile(r"cross|(?<![a-z])x_?attn|enc_?dec|encoder_attn|encoder_decoder", re.IGNORECASE)


def attends_elsewhere(layer: Any, parent: nn.Module | None, name: str) -> bool:
    """Whether a layer's queries are no tokens of its keys' sequence."""
    around = None if parent is None else type(parent)
    kind = layer.plain_class if isinstance(layer, Swapped) else type(layer)
    nearest = name.split(".")[-2:]  # its own name, and that of a module around it
    return bool(
        getattr(layer, "is_cross_attention", False)
        or _OTHER_QUERY.search(f"{kind.__name__} {'' if around is None else around.__name__}")
        or _NAMED.search(".".join(nearest))
        or "pool" in nearest[-1].lower()
        or _reads_another(layer, kind, around, nearest[-1])
    )


def _reads_another(layer: nn.Module, kind: type[nn.Module], around: type[nn.Module] | None, name: str) -> bool:
    """Whether keys are made of a required argument that queries are not made of.

    A forward of queries, keys and values may be given one sequence three times: there the call of the module around it
    must show others, and the layer's name must not say "self".
    """
    names, call = separate(layer), interface_call(kind)
    if names is None or not isinstance(call, InterfaceCall):
        return False
    queries, keys, values = (call.sequences(each) for each in names)
    others = (keys - queries) & call.required
    if not others or keys & values:
        return bool(others)
    if around is None or "self" in name.lower():
        return False
    given = [each for each in arguments_at(around, name, call.parameters) if each.keys() >= queries | others]
    return any({each[one] for one in queries}.isdisjoint(each[one] for one in others) for each in given)
