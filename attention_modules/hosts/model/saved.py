"""Models with a ``save_pretrained`` of another library than transformers: it writes weights, and not what was swapped.

Their ``from_pretrained`` builds the plain class; that of huggingface_hub's mixin passes over weights without a place.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from attention_modules.hosts.base import Swapped, acting_mechanism
from attention_modules.hosts.model.attached import attach, is_of_transformers
from attention_modules.mechanisms.softmax import SoftmaxAttention


def tell_when_saved(model: nn.Module) -> None:
    """Have such models with swapped layers warn when they are saved, and say how the folder is read."""
    attach(model, "save_pretrained", _save_and_tell, _concerned)


def _concerned(module: nn.Module) -> bool:
    kind = type(module)
    return hasattr(kind, "from_pretrained") and not is_of_transformers(module) and not _of_peft(kind)


def _of_peft(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "peft"  # writes adapters alone, and is told of them


def _save_and_tell(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a model with swapped layers."""
    found = (acting_mechanism(part.mechanism) for part in model.modules() if isinstance(part, Swapped))
    acting = [mechanism for mechanism in found if type(mechanism) is not SoftmaxAttention]
    if acting:
        kind = type(model).__name__
        warnings.warn(
            f"saving {len(acting)} swapped attention layers ({type(acting[0]).__name__}), of which the folder does not "
            f"tell: {kind}.from_pretrained builds plain attention, and may pass over the tensors of mechanisms without "
            f"a word. Build the {kind}, swap it as this one, and give its load_state_dict() the weight file",
            stacklevel=2,
        )
    return type(model).save_pretrained(model, *args, **kwargs)
