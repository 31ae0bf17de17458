"""A module outside of its trainer's loops, in the trainer's precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules import AttentionMechanism


class InPrecision(nn.Module):
    """A LightningModule as its trainer runs it, in the trainer's precision.

    Args:
        module: the LightningModule.
        trainer: its trainer.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        super().__init__()
        self.module = module
        self._plugin = trainer.precision_plugin

    def forward(self, images: Tensor) -> Tensor:
        with self._plugin.forward_context():
            return self.module(self._plugin.convert_input(images))

    def _get_name(self) -> str:
        return type(self.module).__name__

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self._plugin.forward_context():
            return self.module.predict_step(batch, batch_idx)


Model = nn.Module | Callable[[Tensor], Tensor]


def networks_of(model: Any, depth: int = 4) -> list[nn.Module]:
    """A model that is a module, or the modules that a function, a method, a container or an object refers to."""
    if isinstance(model, nn.Module):
        return [model]
    held: list[Any] = []
    if isinstance(model, (list, tuple, set, dict)):
        held += model.values() if isinstance(model, dict) else model
    elif isinstance(model, partial):
        held += [model.func, *model.args, *model.keywords.values()]
    elif callable(model) and not isinstance(model, type):
        held += [getattr(model, "__self__", None), *getattr(model, "__dict__", {}).values()]
        function = getattr(model, "__func__", model)
        if isfunction(function) and not (function.__module__ or "").startswith("torch"):
            found = getclosurevars(function)
            held += [*found.nonlocals.values(), *found.globals.values()]
    return [network for each in held for network in networks_of(each, depth - 1)] if depth else []


@contextmanager
def held_still(model: Model, gradients: bool) -> Iterator[None]:
    """The model in eval mode, with or without gradients whatever the caller's mode is; then as it was before."""
    modes = [(module, module.training) for network in networks_of(model) for module in network.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def mechanisms_of(model: nn.Module) -> list[AttentionMechanism]:
    """Those in a model, in its order."""
    return [each for each in model.modules() if isinstance(each, AttentionMechanism)]


def gradient_note(model: nn.Module, norm: float = math.nan) -> str:
    """What speaks against a model's gradients for its input, in words; "" where they are those of its output.

    A mechanism that draws has another gradient in training alone.

    Args:
        model: whose.
        norm: of the gradients, where it was measured.
    """
    names = {type(each).__name__ for each in mechanisms_of(model) if each.surrogate_gradient and not each.stochastic}
    if names:
        return f"the gradient of {', '.join(sorted(names))} is not that of the output"
    return "the input gradient is zero: an attack by it says nothing" if norm == 0 else ""
