"""Attention layers of timm's models as the models call them: their true sizes, on real tensors, one by one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts import attention_layers
from attention_modules.swap import restore_attention, swap_attention

FEW_TOKENS, SIDE = 200, 14
OPTIONS: dict[str, dict[str, Any]] = {"symmetric": {}, "rpc": {"iterations": 2}}


@dataclass
class Call:
    """A layer without values, and what its model calls it with."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for layers that do the same."""
        shapes = [tuple(value.shape) if isinstance(value, Tensor) else value for value in self._given()]
        return f"{type(self.layer)} {self.layer} {vars(self.layer).get('window_size')} {shapes}"

    def _given(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]


def image_for(model: Any, device: str) -> Tensor:
    """One image of the model's size."""
    return torch.zeros(1, *model.default_cfg["input_size"], device=device)


def calls(model: nn.Module) -> dict[str, Call]:
    """Each attention layer's first call in a forward pass on the meta device; one of a kind."""
    seen: dict[str, Call] = {}
    handles = []
    for found in attention_layers(model):

        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(layer, args, kwargs)
            seen.setdefault(call.key, call)

        handles.append(found.module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model.eval()
        model(image_for(model, "meta"))
    for handle in handles:
        handle.remove()
    return seen


def real(layer: nn.Module) -> nn.Module:
    """A copy with values of the size that training starts from."""
    for module in layer.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    layer = copy.deepcopy(layer).to_empty(device="cpu")
    for buffer in layer.buffers():
        buffer.zero_()
    for module in layer.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_running_stats()
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 1 and "table" not in name:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        else:
            nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.1)
    layer.eval()
    return layer


def inputs(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real tensors of the call's shapes, cut to few tokens where nothing fixes their number."""
    generator = torch.Generator().manual_seed(0)

    def fill(name: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.bool:
            return torch.ones(value.shape, dtype=torch.bool)
        made = torch.randn(value.shape, generator=generator)
        if name in ("mask", 1) and value.dim() == 3 and value.shape[1] == value.shape[2]:  # shifted windows
            return (made > 1).float().mul(-100.0).mul(1 - torch.eye(value.shape[1]))
        return made

    args = tuple(fill(index, value) for index, value in enumerate(call.args))
    kwargs = {name: fill(name, value) for name, value in call.kwargs.items()}
    if _free_grid(call):
        args = (args[0][:, :SIDE, :SIDE], *args[1:])
    elif _free_length(call):
        args = (args[0][:, :FEW_TOKENS], *args[1:])
        rope = kwargs.get("rope")
        if rope is not None:
            prefix = getattr(call.layer, "num_prefix_tokens", 0)
            kwargs["rope"] = rope[..., : args[0].shape[1] - prefix, :]
    return args, kwargs


def _free_grid(call: Call) -> bool:
    """Whether the layer takes ``[B, h, w, C]`` of any size."""
    modules = ("vision_transformer_sam", "hieradet_sam2", "volo")
    return type(call.layer).__module__.rpartition(".")[2] in modules and getattr(call.layer, "rope", None) is None


def _free_length(call: Call) -> bool:
    """Whether the layer takes any number of tokens ``[B, N, C]``, with rope or nothing beside them."""
    others = [value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, Tensor)]
    rope = call.kwargs.get("rope")
    unbiased = type(call.layer).__name__ in ("Attention", "AttentionRope", "EvaAttention") and not any(
        "bias" in name and "." not in name and not name.endswith(("q_bias", "k_bias", "v_bias"))
        for name, _ in call.layer.named_parameters()
    )
    return unbiased and call.args[0].dim() == 3 and all(value is rope for value in others)


def exercise(call: Call) -> dict[str, str]:
    """Softmax must change nothing, and each mechanism train: mechanism -> "" or what went wrong or was refused."""
    layer = real(call.layer)
    args, kwargs = inputs(call)
    outcome: dict[str, str] = {}
    with torch.no_grad():
        plain = layer(*args, **kwargs)
        swap_attention(layer, "softmax")
        difference = (layer(*args, **kwargs) - plain).abs().max().item()
        restore_attention(layer)
        again = torch.equal(layer(*args, **kwargs), plain)
    outcome["softmax"] = "" if difference <= 1e-5 and again else f"changes by {difference:.1e}, restored: {again}"
    for mechanism, options in {"softmax": {}, **OPTIONS}.items():
        try:
            swap_attention(layer, mechanism, **options)
        except ValueError as error:
            outcome[mechanism] = f"refused: {error}"
            continue
        outcome[mechanism] = outcome.get(mechanism, "") or _trains(layer, args, kwargs)
        restore_attention(layer)
    return outcome


def _trains(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    layer.train()
    layer.zero_grad()
    out = layer(*args, **kwargs)
    out.square().mean().backward()
    layer.eval()
    if not out.isfinite().all():
        return "output is not finite"
    unused = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    return f"no finite gradient: {unused}" if unused else ""
