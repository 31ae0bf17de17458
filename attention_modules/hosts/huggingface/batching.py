"""Continuous batching: tokens of several requests in one row, their keys and values in a paged cache.

The mask says which keys each token may see, so that a mechanism sees what it sees with a cache of its own, as far as it
takes masks by row and needs keys and values alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.huggingface.caches import why_no_cache
from attention_modules.hosts.model.attached import attach, is_of_transformers

_METHOD = "init_continuous_batching"


def attach_batching(model: nn.Module) -> None:
    """Have each model that generates with swapped layers look at them before continuous batching begins."""
    attach(model, _METHOD, _init_swapped, is_of_transformers)


def _init_swapped(model: Any, *args: Any, **kwargs: Any) -> Any:
    """``init_continuous_batching`` of a model with swapped layers, which ``generate_batch`` calls too.

    Raises:
        NotImplementedError: if a mechanism cannot be given what a paged cache holds, or the model's attention
            implementation makes no masks.
    """
    layers = [module for module in model.modules() if isinstance(module, Swapped)]
    if reasons := _refusals(model, layers):
        raise NotImplementedError(
            f"continuous batching: {', '.join(reasons)}. Call generate() for each batch instead, or "
            "restore_attention(model) first"
        )
    method = getattr(type(model), _METHOD)
    given = inspect.signature(method).bind(model, *args, **kwargs)
    given.arguments["continuous_batching_config"] = _with_masks(model, given.arguments)
    return method(*given.args, **given.kwargs)


def _refusals(model: Any, layers: Sequence[Any]) -> list[str]:
    """Why these layers cannot be batched continuously, if so."""
    reasons = why_no_cache(layers)
    mechanisms = {type(layer.mechanism).__name__: layer.mechanism for layer in layers}
    reasons += [
        f"{name} must remember something of each token, and a paged cache has no place for it"
        for name, mechanism in mechanisms.items()
        if mechanism.remembers
    ]
    reasons += [
        f"{name} takes masks of padding alone, and here each row sees the tokens of its own request"
        for name, mechanism in mechanisms.items()
        if not mechanism.row_masks and mechanism.cache != "state"
    ]
    reasons += [
        f"{name} keeps a state of each request, and layers are not told whose tokens they are given (requests with a "
        "common beginning share the first blocks of a paged cache, too)"
        for name, mechanism in mechanisms.items()
        if mechanism.cache == "state"
    ]
    reasons += [
        f"{name} has no query, and with this version of transformers layers do not tell which keys are new"
        for name in dict.fromkeys(
            type(layer.mechanism).__name__
            for layer in layers
            if not layer.mechanism.uses_query and "cache" in inspect.signature(layer.plain_class.forward).parameters
        )
    ]
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager", "paged|eager"):
        reasons.append(
            f"{implementation!r} makes no mask, which the swapped layers need: call "
            'model.set_attn_implementation("sdpa")'
        )
    return reasons


def _with_masks(model: Any, arguments: dict[str, Any]) -> Any:
    """The configuration of the call, in which the model does not switch to an implementation without masks."""
    from transformers import ContinuousBatchingConfig

    config = arguments.get("continuous_batching_config")
    if config is None:
        generation = arguments.get("generation_config") or model.generation_config
        config = getattr(generation, "continuous_batching_config", None) or ContinuousBatchingConfig()
    config = copy.copy(config)
    config.auto_switch_to_flash = False
    return config


def paged(
    module: Any, cache: Any, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """All keys and values of the requests, ``[1, H, M, d]``, and the boolean mask of what each new token may see.

    Args:
        module: the layer.
        cache: transformers' paged cache, which keeps the new keys and values.
        key: of the new tokens, ``[1, H, N, d]``.
        value: of the new tokens.
        mask: additive ``[1, 1, N, M]``.
        arguments: what the attention function was called with, where the cache finds where to read and write.

    Raises:
        NotImplementedError: if there is no mask, as where a flash implementation was chosen after the check.
    """
    if mask is None:
        raise NotImplementedError(
            "continuous batching gives no mask here, so that the mechanism would see other requests: call "
            'model.set_attn_implementation("sdpa")'
        )
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=arguments)
    return key, value, mask if mask.dtype == torch.bool else mask == 0
