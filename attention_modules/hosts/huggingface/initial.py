"""What transformers' initialization of weights does to mechanisms: it leaves what they hold, and fills empty ones.

``post_init()``, of a model that is put around a swapped one too, initializes each module without a mark. And
``from_pretrained`` of a class that swaps in its ``__init__`` builds the model without memory, and has the model's
``_init_weights`` fill what the folder lacks. That knows nothing of mechanisms, whose Parameters would hold whatever
stood in the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import AttentionSwapError, Swapped
from attention_modules.hosts.model.attached import attach, is_of_transformers

_DONE = "_is_hf_initialized"  # transformers' mark of a module, and of a tensor


def attach_initial(model: nn.Module) -> None:
    """Have each model with swapped layers make mechanisms as a swap does, and only those without memory."""
    attach(model, "_init_weights", _init_weights, is_of_transformers)
    attach(model, "mark_tied_weights_as_initialized", _refuse_whole_projections, is_of_transformers)
    for layer in model.modules():
        if isinstance(layer, Swapped) and not any(tensor.is_meta for tensor in layer.mechanism.state_dict().values()):
            for module in layer.mechanism.modules():
                module.__dict__.setdefault(_DONE, True)


def _refuse_whole_projections(model: Any, loading_info: Any) -> None:
    """What ``from_pretrained`` calls once it has read the files: a projection without its query takes no whole one.

    Raises:
        AttentionSwapError: with the name and sizes of the first such weight.
    """
    swapped = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Swapped))
    lost = {part.key(f"{name}." if name else "") for name, layer in swapped for part in layer.dropped_query}
    if refused := sorted(entry for entry in loading_info.mismatched_keys if entry[0] in lost):
        loading_info.mismatched_keys -= set(refused)  # for which transformers' report would advise what cannot help
        name, there, here = refused[0]
        raise AttentionSwapError(
            f"from_pretrained cannot load {name!r} of {list(there)} into {list(here)}: the class swaps itself when it "
            "is built, and its mechanism uses no query; load the plain class and swap then, or give the plain class to "
            "attnswap.load_pretrained, which reads swapped folders"
        )
    type(model).mark_tied_weights_as_initialized(model, loading_info)


@torch.no_grad()
def _init_weights(model: Any, module: nn.Module) -> None:
    """``_init_weights`` of a model with swapped layers: what no file gave a mechanism is as it is built."""
    if not isinstance(module, AttentionMechanism) or module.built_with is None:
        type(model)._init_weights(model, module)
        return
    new = type(module)(module.spec, **module.built_with).state_dict()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not getattr(tensor, _DONE, False):
            tensor.copy_(new[name])
