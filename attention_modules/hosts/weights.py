"""Reading the weight of one head's projection, LoRA included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attention_modules.hosts.forwards import definer, has_other_forward

# What a weight is read from: float8 is scaled by a number that stands elsewhere.
READABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LINEAR = (  # classes whose forward computes x Wᵀ + b
    ("torch.nn.modules.linear", "Linear"),
    ("torch.nn.modules.conv", "Conv1d"),
    ("torch.nn.modules.conv", "Conv2d"),
    ("transformers.pytorch_utils", "Conv1D"),
)
QUANTIZERS = ("bitsandbytes", "torchao", "optimum", "hqq")  # packages whose Tensors hold codes under a floating dtype


def wrapped_by_peft(module: nn.Module) -> bool:
    """Whether this is one of peft's layers, around a projection or a whole attention layer."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")


@dataclass(frozen=True)
class Rows:
    """Output features ``start`` to ``stop`` of a projection's weight, in each of its blocks.

    Args:
        owner: the module that holds the weight.
        start: first output feature.
        stop: one past the last output feature.
        tensor: name of the weight in its owner.
        transposed: whether the weight is ``[in, out]``, as in Conv1D.
        blocks: equal blocks that the features lie in.
    """

    owner: nn.Module
    start: int
    stop: int
    tensor: str = "weight"
    transposed: bool = False
    blocks: int = 1

    def weight(self) -> Tensor:
        """``[blocks * (stop - start), in]``, differentiable in the current values (LoRA: the effective weight).

        Raises:
            ValueError: if the weight is quantized, or an adapter's update has no additive form.
        """
        owner: Any = self.owner
        if wrapped_by_peft(owner):
            full = _plain(owner.base_layer)
            for adapter in _acting_adapters(owner):
                full = full + owner.get_delta_weight(adapter)
        else:
            full = _plain(owner, self.tensor)
        full = full.t() if self.transposed else full.flatten(1)  # a 1 x 1 convolution's is [out, in, 1, 1]
        return full.unflatten(0, (self.blocks, -1))[:, self.start : self.stop].flatten(0, 1)

    def features(self) -> list[int]:
        """Where the features lie along the output dimension of the owner's tensor, ``[blocks * (stop - start)]``."""
        held = getattr(self.owner, self.tensor)
        total = held.shape[-1 if self.transposed else 0]  # a bias has one dimension
        places: list[int] = torch.arange(total).view(self.blocks, -1)[:, self.start : self.stop].flatten().tolist()
        return places

    @torch.no_grad()
    def scale(self, factors: Tensor) -> None:
        """Multiply the features in place by one factor each, ``[blocks * (stop - start)]``; the others are not touched.

        The tensor is a Parameter or buffer of the owner (a bias may be one), and none that is computed at each call.
        """
        held = getattr(self.owner, self.tensor).detach()
        held = held.t() if self.transposed and held.ndim > 1 else held
        part = held.unflatten(0, (self.blocks, -1))[:, self.start : self.stop]
        part.mul_(factors.to(part.dtype).view(self.blocks, -1, *[1] * (part.ndim - 2)))

    def parameters(self) -> list[nn.Parameter]:
        """The Parameters that :meth:`weight` reads.

        Raises:
            ValueError: if a module computes the weight otherwise, or at each call.
        """
        owner: Any = self.owner
        if not wrapped_by_peft(owner):
            if more := computes_more(owner, self.tensor):
                raise ValueError(more)
            if parametrize.is_parametrized(owner, self.tensor):
                return list(owner.parametrizations[self.tensor].parameters())
            value = getattr(owner, self.tensor)
            if not isinstance(value, nn.Parameter):
                raise ValueError(
                    f"the {self.tensor} of {type(owner).__name__} is no Parameter (pruning and old weight norms make "
                    "such ones): make it one, as prune.remove() does, or name the layer in exclude="
                )
            return [value]
        sides = [getattr(owner, side) for side in ("lora_A", "lora_E", "lora_B") if hasattr(owner, side)]
        factors = [side[name] for name in _acting_adapters(owner) for side in sides]
        return [owner.base_layer.weight, *(each if isinstance(each, nn.Parameter) else each.weight for each in factors)]


def quantized(owner: nn.Module, tensor: str = "weight") -> str | None:
    """Why the numbers of a module's weight are no weights but the codes of a quantized one, if so."""
    weight = getattr(owner, tensor)
    # A subclass of Tensor may call itself floating and hold codes (torchao, quanto); a Parameter's own class is fine.
    own = isinstance(weight, Tensor) and type(weight).__module__.partition(".")[0] not in QUANTIZERS
    if own and weight.dtype in READABLE:
        return None
    kind = str(weight.dtype) if isinstance(weight, Tensor) else "no tensor"
    return (
        f"the weight of {type(owner).__name__} is quantized ({type(weight).__name__}, {kind}): its numbers are codes, "
        "not weights; load the model unquantized, or dequantize it first (Hugging Face: model.dequantize()), or leave "
        "this layer out"
    )


def trained_instead(module: Any) -> Any:
    """What acts where peft trains a copy of a whole module (``modules_to_save``); others as they are."""
    if not (type(module).__module__.startswith("peft.") and hasattr(module, "modules_to_save")):
        return module
    active = () if module.disable_adapters else module.active_adapters
    return module.modules_to_save[active[0]] if active else module.original_module


def computes_more(owner: nn.Module, tensor: str = "weight") -> str | None:
    """Why a projection's weight is not all that it multiplies by, if so: a LoRA layer of one's own, say."""
    owner = trained_instead(owner)
    kind = definer(type(owner))
    ours = kind.__module__.partition(".")[0] == "attention_modules"
    known = ours or (kind.__module__, kind.__name__) in _LINEAR or tensor not in ("weight", "bias")
    # Hooks of accelerate replace the object's forward too, and compute the same.
    if hasattr(owner, tensor) and known and (hasattr(owner, "_hf_hook") or not has_other_forward(owner)):
        return None
    codes = quantized(owner, tensor) if isinstance(getattr(owner, tensor, None), Tensor) else None
    return codes or (
        f"the weights of a projection in {type(owner).__name__} cannot be read, as it has a forward of its own: merge "
        "what it adds into a plain layer (one that adds nothing can do without that forward), or leave this layer out"
    )


def _plain(owner: nn.Module, tensor: str = "weight") -> Tensor:
    """The weight, refused where it is quantized, or a part of what the owner computes with."""
    if more := computes_more(owner, tensor):
        raise ValueError(more)
    if codes := quantized(owner, tensor):
        raise ValueError(codes)
    weight: Tensor = getattr(owner, tensor)
    return weight


def bias_of(projection: Any) -> Tensor | None:
    """The bias that a projection adds, an adapter's own too (peft's ``lora_bias=True``); None where there is none."""
    if not wrapped_by_peft(projection):
        return projection.bias
    bias: Tensor | None = projection.base_layer.bias
    for adapter in _acting_adapters(projection):
        added = getattr(projection.lora_B[adapter], "bias", None)
        if added is not None:
            bias = added * projection.scaling[adapter] + (0 if bias is None else bias)
    return bias


def _acting_adapters(owner: Any) -> list[str]:
    """The LoRA adapters whose update is not yet in the base weight."""
    if not hasattr(owner, "lora_A"):
        raise ValueError(
            f"the weights of a projection in {type(owner).__name__} cannot be read: only LoRA is known; merge the "
            "adapter first (merge_and_unload())"
        )
    if owner.disable_adapters or owner.merged:
        return []
    names = [name for name in owner.active_adapters if name in owner.lora_A]
    if any(name in getattr(owner, "lora_variant", {}) for name in names):
        raise ValueError("a LoRA variant (DoRA or alike) has no additive weight: merge it first (merge_and_unload())")
    return names
