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
from attention_modules.mechanisms.shared.probe import repeatable, unobserved

_MOST_TOKENS = 256


def refuse_outside(mechanism: AttentionMechanism, layer: nn.Module | None = None) -> None:
    """Refuse a function whose output depends on a tensor that trains and that no layer gives it, by a call of it.

    One that fails in this call, of few tokens, is not judged. What it keeps, and random states, are as before.

    Args:
        mechanism: of those that are no functions, none is refused.
        layer: whose device and dtype are tried; else float32 on the CPU.

    Raises:
        TypeError: with the kind and shape of the tensor that trains.
    """
    out = _tried(mechanism, layer) if isinstance(mechanism, FunctionAttention) else None
    for trained in _leaves(out):
        raise TypeError(
            f"the output of {type(mechanism).__name__} depends on a {type(trained).__name__} of shape "
            f"{list(trained.shape)} {OUTSIDE}"
        )


def _tried(mechanism: AttentionMechanism, layer: nn.Module | None) -> Any:
    """What a mechanism gives for tensors that do not train; None if it fails."""
    spec = mechanism.spec
    heads, width, dim = (spec.num_heads, spec.head_dim, spec.dim) if spec.told else (2, 4, 8)
    tokens = min(spec.num_tokens or 4, _MOST_TOKENS)
    floating = (each for each in layer.parameters() if each.is_floating_point()) if layer is not None else iter(())
    like = next((each for each in floating if not each.is_meta), torch.empty(0, device="cpu"))
    query = like.new_empty(1, heads, tokens, width)
    value = like.new_empty(1, heads, tokens, (spec.value_dim or width) if spec.told else width)
    needed = {name: like.new_empty(1, tokens, dim) if name == "x" else value for name in mechanism.needs}
    with ExitStack() as quiet:
        quiet.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        quiet.enter_context(torch.compiler.set_stance("force_eager"))
        quiet.enter_context(torch.inference_mode(False))
        quiet.enter_context(torch.enable_grad())
        quiet.enter_context(unobserved(mechanism))
        quiet.enter_context(repeatable(like.device))
        quiet.enter_context(suppress(Exception))
        q, k, v, *others = (
            quasi_random(each, turn) for turn, each in enumerate((query, query, value, *needed.values()))
        )
        return mechanism.forward(q, k, v, None, spec.is_causal, **dict(zip(needed, others, strict=True)))  # type: ignore[arg-type]
    return None


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
