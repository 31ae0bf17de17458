"""A copy of a model that shares its tensors: what a model was before a swap, kept beside what it is after."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TypeVar

from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)


def shared_copy(model: _Module, own: Collection[str] = ()) -> _Module:
    """A copy of a model's modules that holds the model's own Parameters and buffers.

    The copy may be swapped, restored and put into eval mode, and the model does not change; it costs no memory for
    weights. What trains the model trains the copy, but for the tensors that are named.

    Args:
        model: the model.
        own: names of Parameters and buffers (under any of their names) that the copy has for itself.

    Raises:
        ValueError: if a name is of neither.

    Example:
        >>> import torch
        >>> from attention_modules.teacher import shared_copy
        >>> model = torch.nn.Linear(2, 2)
        >>> twin = shared_copy(model, own=["bias"])
        >>> twin.weight is model.weight, twin.bias is model.bias
        (True, False)
    """
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if unknown := sorted(set(own) - tensors.keys()):
        raise ValueError(f"own= names {unknown[0]!r}, which is no Parameter or buffer of {type(model).__name__}")
    owned = {id(tensors[name]) for name in own}
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors.values() if id(tensor) not in owned})
