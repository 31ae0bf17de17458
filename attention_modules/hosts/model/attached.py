"""Methods of models that a swap replaces on the model itself, and gives back when nothing is swapped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from attention_modules.hosts.base import Swapped


class _Attached(functools.partial[Any]):
    """``function(model, ...)`` in place of the model's own method; unlike a closure, it is copied and pickled with it.

    It has the method's signature, by which diffusers decides what to hand over.
    """

    attribute: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.args[0]), self.attribute))


def attach(
    model: nn.Module, attribute: str, function: Callable[..., Any], concerned: Callable[[nn.Module], bool]
) -> None:
    """Have the method of each concerned module with swapped layers be ``function(module, ...)``, and only theirs."""
    for module in model.modules():
        if not hasattr(type(module), attribute) or not concerned(module):
            continue
        found = vars(module).get(attribute)
        ours = isinstance(found, _Attached) and found.func is function
        if any(isinstance(child, Swapped) for child in module.modules()):
            if not ours:
                module.__dict__[attribute] = attached = _Attached(function, module)
                attached.attribute = attribute
        elif ours:
            del module.__dict__[attribute]


def is_of_transformers(module: nn.Module) -> bool:
    """Whether it is one of Hugging Face's ``PreTrainedModel``, whose library is imported for none other."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
