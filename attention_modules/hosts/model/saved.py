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
    for part in model.modules():
        for key in [key for key, hook in part._state_dict_pre_hooks.items() if hook is _tell_of_adapters]:
            del part._state_dict_pre_hooks[key]
    if any(isinstance(part, Swapped) for part in model.modules()):
        model.register_state_dict_pre_hook(_tell_of_adapters)


def _concerned(module: nn.Module) -> bool:
    kind = type(module)
    return hasattr(kind, "from_pretrained") and not is_of_transformers(module) and not _of_peft(kind)


def _of_peft(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "peft"  # writes adapters alone, and is told of them


def _acting(model: nn.Module) -> list[nn.Module]:
    """The mechanisms in a model's layers other than plain softmax."""
    found = (acting_mechanism(part.mechanism) for part in model.modules() if isinstance(part, Swapped))
    return [each for each in found if each is not None and type(each) is not SoftmaxAttention]


def _tell_of_adapters(model: nn.Module, prefix: str, keep: bool) -> None:
    """Say what a peft model's folder lacks, when its state is taken; nothing of ours runs where it is read."""
    if (prefix.startswith("base_model.model.") or _of_peft(type(model))) and (acting := _acting(model)):
        held = [part.mechanism for part in model.modules() if isinstance(part, Swapped)]
        unsaved = sum(not _of_peft(type(each)) and next(each.parameters(), None) is not None for each in held)
        lost = (
            f"the Parameters of {unsaved} mechanisms are in no file of it, where "
            "LoraConfig(modules_to_save=['mechanism']) would have them; "
            if unsaved
            else ""
        )
        warnings.warn(
            f"peft saves the adapters of a model with {len(acting)} swapped attention layers "
            f"({type(acting[0]).__name__}), of which its folder does not tell: PeftModel.from_pretrained computes "
            "plain attention without a word, unless the base model is swapped as this one first; "
            f"{lost}or save what merge_and_unload() returns",
            stacklevel=2,
        )


def _save_and_tell(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a model with swapped layers."""
    if acting := _acting(model):
        kind = type(model).__name__
        warnings.warn(
            f"saving {len(acting)} swapped attention layers ({type(acting[0]).__name__}), of which the folder does not "
            f"tell: {kind}.from_pretrained builds plain attention, and may pass over the tensors of mechanisms without "
            f"a word. Build the {kind}, swap it as this one, and give its load_state_dict() the weight file",
            stacklevel=2,
        )
    return type(model).save_pretrained(model, *args, **kwargs)
