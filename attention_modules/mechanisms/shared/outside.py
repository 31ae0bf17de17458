"""Functions whose output depends on what trains outside of the swapped model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.base import AttentionMechanism
from attention_modules.function import OUTSIDE, FunctionAttention
from attention_modules.mechanisms.shared.acting import quasi_random
from attention_modules.mechanisms.shared.unchanged import repeatable, unobserved

_MOST_TOKENS = 256


def refuse_outside(mechanism: AttentionMechanism, layer: nn.Module | None = None) -> None:
    """Refuse a function whose output depends on a tensor that trains and that no layer gives it, by calls of it.

    One that fails in these, of few tokens, is not judged. What it keeps, and random states, are as before.

    Args:
        mechanism: of those that are no functions, none is refused.
        layer: whose device and dtype are tried; else float32 on the CPU.

    Raises:
        TypeError: with the kind and shape of the tensor that trains.
    """
    if not isinstance(mechanism, FunctionAttention):
        return
    first, *second = [[*_leaves(out)] for out in _tried(mechanism, layer)] or [[]]
    for trained in first:  # none that the function itself makes in each call, to differentiate by it
        if any(trained is each for each in second[0]) if second else isinstance(trained, nn.Parameter):
            raise TypeError(
                f"the output of {type(mechanism).__name__} depends on a {type(trained).__name__} of shape "
                f"{list(trained.shape)} {OUTSIDE}"
            )


def _tried(mechanism: AttentionMechanism, layer: nn.Module | None) -> list[Any]:
    """What a mechanism gives for tensors that do not train, in one call and the next, until it fails."""
    spec = mechanism.spec
    heads, width, dim = (spec.num_heads, spec.head_dim, spec.dim) if spec.told else (2, 4, 8)
    tokens = min(spec.num_tokens or 4, _MOST_TOKENS)
    sizes: dict[str, tuple[int, ...]] = {"q": (1, heads, tokens, width), "k": (1, heads, tokens, width)}
    values = (1, heads, tokens, (spec.value_dim or width) if spec.told else width)
    sizes |= {name: (1, tokens, dim) if name == "x" else values for name in ("v", *mechanism.needs)}
    floating = (each for each in layer.parameters() if each.is_floating_point()) if layer is not None else iter(())
    like = next((each for each in floating if not each.is_meta), torch.empty(0, device="cpu"))
    place, given = {"device": like.device, "dtype": like.dtype}, list[Any]()
    with ExitStack() as quiet:
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        quiet.enter_context(torch.compiler.set_stance("force_eager"))
        quiet.enter_context(torch.inference_mode(False))
        quiet.enter_context(torch.enable_grad())
        quiet.enter_context(unobserved(mechanism))
        quiet.enter_context(repeatable(like.device))
        quiet.enter_context(suppress(Exception))
        for _ in range(2):
            made: dict[str, Any] = {
                name: quasi_random(torch.empty(size, **place), turn)  # type: ignore[call-overload]
                for turn, (name, size) in enumerate(sizes.items())
            }
            given.append(mechanism.forward(**made, is_causal=spec.is_causal))
    return given


def _leaves(out: Any) -> Iterator[Tensor]:
    """The tensors from which a result was computed and to which gradients of it go."""
    waiting, known = [out.grad_fn if isinstance(out, Tensor) else None], set[Any]()
    while waiting:
        if (node := waiting.pop()) is None or node in known:
            continue
        known.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
