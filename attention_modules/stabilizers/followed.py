"""Whether queries and keys follow the scale of their weights, by a trial of the layer's call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.base import queries_of
from attention_modules.hosts import AttentionLayer
from attention_modules.hosts.model.inputs import copied_arguments
from attention_modules.hosts.sdpa.rehearsed import rehearsed
from attention_modules.stabilizers.clip import query_key_rows


class _Reached(Exception):
    """Queries and keys are there, and the rest of a trial tells nothing."""


@torch.no_grad()
def follows_scale(
    layer: AttentionLayer, args: Sequence[Any], kwargs: Mapping[str, Any], factor: float, moved: bool = False
) -> bool | None:
    """Whether q and k of a call take a factor that W_q, W_k and their biases are multiplied by, in a trial.

    A clamp, a norm, a bias that is added later, or keys of an earlier call do not. The layer runs without hooks and in
    evaluation mode, and nothing of it or of the arguments changes.

    Args:
        layer: a swapped layer for which :func:`.clip_refusal` has no reason.
        args: arguments of the call.
        kwargs: those by name.
        factor: a power of two, so that products are exact.
        moved: whether to add random numbers to the layer's Parameters in the trial, as they may be 0 now.

    Returns:
        None where the trial shows nothing: it does not reach the mechanism, or all is 0 or not finite.

    Raises:
        Exception: what the layer raises on trial, as of an argument that cannot be copied.
    """
    assert layer.mechanism is not None
    rows, link = query_key_rows(layer), getattr(layer.module, "link", None)
    own = {(each.owner, each.tensor): None for each in rows}
    if moved:
        parts = layer.module.modules()
        own |= {(part, name): None for part in parts for name, held in part._parameters.items() if held is not None}
    seen: list[tuple[Tensor, Tensor]] = []
    for by in (1.0, factor):
        draws = torch.Generator().manual_seed(0) if moved else None
        others = None if link is None else link.given()
        alone = nullcontext() if link is None or others is None else link.held(others)  # its turn in the pass is yet
        with suppress(_Reached), _no_cached_casts(), alone, rehearsed(layer.module):
            for part, name in own:
                _put(part, name, _changed(getattr(part, name).detach(), draws))
            for each in set(rows):
                each.scale(torch.full((len(each.features()),), by, device=getattr(each.owner, each.tensor).device))
            given, by_name = copied_arguments((tuple(args), dict(kwargs)))
            layer.mechanism.register_forward_pre_hook(_reached(seen))
            layer.module.forward(*given, **by_name)
    if len(seen) < 2:
        return None
    kinds = {each.dtype for each in (*layer.module.parameters(), *seen[0])}
    if torch.is_autocast_enabled(seen[0][0].device.type):
        kinds.add(torch.get_autocast_dtype(seen[0][0].device.type))
    rounded = torch.float16 in kinds  # whose digits small numbers lose, whatever they became since
    found = [_is_times(one, other, factor, rounded, random=moved) for one, other in zip(*seen, strict=True)]
    return False if False in found else None if None in found else True


def _reached(seen: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    def hook(mechanism: Any, args: tuple[Tensor, ...]) -> None:
        seen.append((queries_of(mechanism, *args[:2]).clone(), args[1].clone()))
        raise _Reached

    return hook


def _changed(value: Tensor, draws: torch.Generator | None) -> Tensor:
    """A copy, to which random numbers are added that make sums of about 1."""
    if draws is None:
        return value.clone()
    numbers = torch.randn(value.shape, generator=draws, dtype=torch.float32, device="cpu")
    return value + (numbers / value.shape[-1:].numel() ** 0.5).to(value)  # 1 of a number alone


def _put(part: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of a Parameter or buffer, in a dict that is the trial's own."""
    kept = "_parameters" if name in part._parameters else "_buffers"
    value = nn.Parameter(value, requires_grad=False) if kept == "_parameters" else value
    vars(part)[kept] = {**vars(part)[kept], name: value}


def _is_times(one: Tensor, other: Tensor, factor: float, rounded: bool, random: bool) -> bool | None:
    """Whether the second ``[B, H, N, d]`` is the first times the factor; None where nothing finite shows it."""
    if one.shape != other.shape:
        return False
    limits, wanted = torch.finfo(torch.float16 if rounded else one.dtype), one * factor
    shown = wanted.isfinite() & other.isfinite()
    far = shown & ~torch.isclose(other, wanted, rtol=4 * limits.eps, atol=limits.tiny)
    if not bool((shown & (other != 0)).any()):
        return None
    if random and rounded:
        # Random weights may be too small for all their digits, and sums cancel: a few numbers of a token or feature.
        of_token, of_feature = far.float().mean(3), far.float().mean((0, 2))
        few = max(0.02, 1 / (far.shape[0] * far.shape[2]))
        return bool((of_token <= 0.25).all() and (of_feature <= few).all())
    return not bool(far.any())


@contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast would keep casts that were made without gradients for the training's own calls."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
