"""Methods of Hugging Face models that a swap replaces on the model itself, and gives back when nothing is swapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_modules.hosts.base import Swapped


def attach(model: nn.Module, attribute: str, function: Callable[..., Any]) -> None:
    """Have the method of each Hugging Face model with swapped layers be ``function(model, ...)``, and only theirs.

    A partial, unlike a closure, is copied and pickled with the model.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or not hasattr(type(module), attribute):
            continue
        found = vars(module).get(attribute)
        ours = isinstance(found, functools.partial) and found.func is function
        if any(isinstance(child, Swapped) for child in module.modules()):
            if not ours:
                module.__dict__[attribute] = functools.partial(function, module)
        elif ours:
            del module.__dict__[attribute]
