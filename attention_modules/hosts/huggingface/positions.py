"""What a model of transformers is told of positions, checked where a layer learns something of them by columns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from attention_modules.hosts.base import Swapped
from attention_modules.hosts.huggingface.columns import check_positions
from attention_modules.hosts.model.inputs import CACHES

# Of a model that checks its positions: the mechanism's name, whether distances will do, and what _source() gives.
_COUNTS = "attnswap_counts"


def watch_positions(model: nn.Module) -> None:
    """Have each model that takes `position_ids` check them, as few hand them on; none where no layer counts."""
    for module in model.modules():
        if not _takes_positions(type(module)):
            continue
        mechanisms = [part.mechanism for part in _of_its_tokens(module) if isinstance(part, Swapped)]
        columns = [each for each in mechanisms if each.counts_columns]
        counting = columns or [each for each in mechanisms if each.counts_distances]
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _check]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.__dict__.pop(_COUNTS, None)
        if counting:
            module.__dict__[_COUNTS] = type(counting[0]).__name__, not columns, _source(module)
            module.register_forward_pre_hook(_check, with_kwargs=True)


def _of_its_tokens(module: nn.Module) -> Iterator[nn.Module]:
    """Its parts, but for towers of images or sounds, whose tokens have no such positions."""
    yield module
    for part in module.children():
        kind = type(part)
        if not _is_model(kind) or _takes_positions(kind) or getattr(part, "main_input_name", None) == "input_ids":
            yield from _of_its_tokens(part)


def _is_model(kind: Any) -> bool:
    return any(each.__name__ == "PreTrainedModel" for each in kind.__mro__)


def _takes_positions(kind: Any) -> bool:
    return _is_model(kind) and "position_ids" in inspect.signature(kind.forward).parameters


def _source(model: nn.Module) -> int | str | None:
    """What the model makes positions of: the mask (OPT), or all tokens but the padding one of this number (RoBERTa)."""
    for part in _of_its_tokens(model):
        kind, made = type(part), "create_position_ids_from_input_ids"
        if isinstance(part, nn.Embedding) and "attention_mask" in inspect.signature(kind.forward).parameters:
            return "mask"
        pad = getattr(part, "padding_idx", None)
        if isinstance(pad, int) and (hasattr(kind, made) or hasattr(sys.modules.get(kind.__module__), made)):
            return pad
    return None


def _made(source: int | str | None, given: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The positions, and the tokens that have none."""
    tokens, mask = given.get("input_ids"), given.get("attention_mask")
    counted = mask if source == "mask" else tokens != source if isinstance(tokens, Tensor) else None
    if source is None or not isinstance(counted, Tensor) or counted.dim() != 2:
        return None, None
    return counted.long().cumsum(-1) - counted.long(), ~counted.bool()


def _check(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(zip(inspect.signature(type(module).forward).parameters, (module, *args), strict=False)) | kwargs
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    pasts = [given[name] for name in CACHES if hasattr(given.get(name), "get_seq_length")]
    if any(past.get_seq_length() for past in pasts):  # the layer refuses a part of the sequence, and names the cure
        return
    name, by_distance, source = module.__dict__[_COUNTS]
    hidden = None
    if positions is None and by_distance:
        positions, hidden = _made(source, given)
    if isinstance(positions, Tensor):
        hidden = mask == 0 if isinstance(mask, Tensor) and mask.shape == positions.shape[-2:] else hidden
        check_positions(name, positions, hidden, by_distance)
