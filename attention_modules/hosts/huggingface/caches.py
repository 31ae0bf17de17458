"""What a swapped layer reads from a key-value cache beside keys and values, and keeps in it.

Keys come to the attention function together with the cached ones. A mechanism without a query needs those of the new
tokens alone, which are its queries; and some need more of each earlier token than its key and value. Both are noted
by the cache's own object for the layer, so that they are reordered, cropped and reset with the keys.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.hosts.model.inputs import CACHES
from attention_modules.sharing import READS

CACHE = "attnswap_cache"  # by which a layer hands the cache that it was called with to our attention function


def keys_of_new(arguments: dict[str, Any], module: nn.Module, keys: Tensor, new: int) -> Tensor:
    """The keys of the new tokens, as the layer gave them to its cache: ``[B, H, new, d]``.

    Args:
        arguments: what the attention function was called with.
        module: the layer.
        keys: all keys ``[B, H, M, d]``.
        new: the number of new tokens.

    Raises:
        NotImplementedError: if the layer was not called with a cache that can tell them.
    """
    layer = _keeping_layer(arguments, module, new)
    if layer is None:
        if keys.shape[2] == new:
            return keys
        raise NotImplementedError(
            f"{type(module.mechanism).__name__} has no query, so it cannot attend to another sequence, or continue "
            f"from this key-value cache ({new} new tokens, {keys.shape[2]} keys): pass use_cache=False"
        )
    return keys[:, :, :new] if layer.new_keys is None else layer.new_keys


def kept_for(arguments: dict[str, Any], module: nn.Module, given: Tensor, keys: int) -> Tensor:
    """What the mechanism remembers of every token that has a key: ``[B, H, M]``, zeros where a static cache is empty.

    Args:
        arguments: what the attention function was called with.
        module: the layer.
        given: what is remembered of the new tokens, ``[B, H, N]``.
        keys: M, the number of keys.

    Raises:
        NotImplementedError: if nothing was kept of earlier tokens.
    """
    new = given.shape[-1]
    layer = _keeping_layer(arguments, module, new)
    if layer is None:
        if keys == new:
            return given
        raise NotImplementedError(
            f"{type(module.mechanism).__name__} must remember something of every token, and cannot attend to another "
            f"sequence, or continue from this key-value cache ({new} new tokens, {keys} keys): pass use_cache=False"
        )
    if not layer.told:  # else this is the second attention of one call, as DiffLlama has two, over the same tokens
        layer.kept = given if layer.kept is None else torch.cat([layer.kept, given], -1)
        layer.told = True
    count = layer.kept.shape[-1]
    # Windows of others keep other keys than the last; what is more than a static cache holds is of another sequence.
    lost = count > keys and not (getattr(layer, "is_sliding", False) and _is_of_the_library(layer))
    more = count < keys and not (isinstance(held := getattr(layer, "keys", None), Tensor) and held.shape[-2] == keys)
    if layer.missed or lost or more:
        raise NotImplementedError(
            f"{type(module.mechanism).__name__} must remember something of every token of this key-value cache, and "
            "some were added while another mechanism was in the layer, its keys were cut by hand, or lie in another "
            "order or beside those of another sequence: start with an empty cache, or shorten it with its own crop(); "
            "else pass use_cache=False"
        )
    shown = layer.kept[..., -keys:]  # a sliding window has let go of the first keys
    return F.pad(shown, (0, keys - shown.shape[-1]))


def _is_of_the_library(layer: Any) -> bool:
    kinds = [kind.__module__ for kind in type(layer).__mro__ if kind.__module__.startswith("transformers.")]
    return kinds[:1] == ["transformers.cache_utils"]


def _keeping_layer(arguments: dict[str, Any], module: Any, new: int) -> Any:
    """The cache's object for the layer, which keeps what it is given from now on; None where there is no cache."""
    cache = arguments.get(CACHE)
    cache = getattr(cache, "self_attention_cache", cache)
    layers, index = getattr(cache, "layers", None), getattr(module, "layer_idx", None)
    if layers is None or index is None or index >= len(layers):
        return None
    if index < 0:
        raise NotImplementedError(
            f"{type(module.mechanism).__name__} keeps something of each token, and {type(module).__name__} is told its "
            "place in the cache at each call alone (a block that is shared, as Zamba2's): pass use_cache=False"
        )
    layer = layers[index]
    if not hasattr(layer, "get_seq_length"):  # it holds nothing, as the keys are those of another layer
        return None
    if not hasattr(layer, "new_keys"):
        held = int(layer.get_seq_length())
        if held != new:
            raise NotImplementedError(
                f"this key-value cache holds {held - new} tokens of layer {index} that no layer with "
                f"{type(module.mechanism).__name__} has seen, as from before a swap or of peft's prefix tuning, and "
                "which it cannot continue from: start with an empty cache, or take prompt tuning or LoRA"
            )
        layer.new_keys, layer.kept = None, None  # all keys of this call are new
        layer.told, layer.missed = False, False  # whether of the last tokens something was kept; whether not of all
        plain: Any = type(layer)
        layer.__class__ = _keeping(plain)
    return layer


@functools.cache
def _keeping(plain: type) -> type:
    """A class of cache layers that keeps the last keys that it was given, and what mechanisms remember."""

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.new_keys = key_states
        self.missed, self.told = self.missed or not self.told, False
        return plain.update(self, key_states, value_states, *args, **kwargs)  # type: ignore[attr-defined]

    def changed(name: str, of_kept: Callable[..., Tensor | None]) -> Callable[..., None]:
        def change(self: Any, *args: Any) -> None:
            getattr(plain, name)(self, *args)
            self.new_keys = None
            if name == "reset":
                self.missed, self.told = False, True
            if self.kept is not None:
                self.kept = of_kept(self, self.kept, *args)

        return change

    changes: dict[str, Callable[..., Tensor | None]] = {
        "reset": lambda layer, kept: None,
        # What its number means has changed between versions of transformers; the length afterwards has not.
        "crop": lambda layer, kept, number: kept[..., : int(layer.get_seq_length())],
        "reorder_cache": lambda layer, kept, rows: kept.index_select(0, rows.to(kept.device)),
        "batch_repeat_interleave": lambda layer, kept, repeats: kept.repeat_interleave(repeats, dim=0),
        "batch_select_indices": lambda layer, kept, rows: kept[rows],
    }
    members = {name: changed(name, of_kept) for name, of_kept in changes.items() if hasattr(plain, name)}
    # A class with a layer type would take the plain one's place in transformers' table.
    own = {"update": update, "__reduce_ex__": _reduced, "_layer_type": None, "plain_class": plain}
    return type(f"Keeping{plain.__name__}", (plain,), {**members, **own, "__module__": __name__})


def _reduced(self: Any, protocol: Any) -> Any:
    return _blank, (self.plain_class,), vars(self).copy()


def _blank(plain: type) -> Any:
    """An empty layer of a cache that keeps, for copying and unpickling to fill."""
    return object.__new__(_keeping(plain))


def warn_of_cache(model: nn.Module, swapped: type[nn.Module]) -> None:
    """Say, once, that generation with a cache will be refused, which settings of the model or inside it ask for.

    Args:
        model: in which a model that generates may be any module.
        swapped: the class of swapped layers.
    """
    reasons: list[str] = []
    writers = []
    for name, module in model.named_modules():
        if getattr(module.__dict__.get("generation_config"), "use_cache", False):
            layers = [each for each in module.modules() if isinstance(each, swapped)]
            found = why_no_cache([each for each in layers if _keeps(each, module)])
            reasons += [each for each in found if each not in reasons]
            writers += [f"{name and '.'}{name}"] * bool(found)
    if writers:
        cure = " and ".join(f"model{name}.generation_config.use_cache = False" for name in writers)
        warnings.warn(
            f"{', '.join(reasons)}, and this model generates with a key-value cache, which the layer will refuse: set "
            f"{cure} before you generate. Training is not concerned",
            stacklevel=5,
        )


def _keeps(layer: Any, model: Any) -> bool:
    """Whether generation gives a layer the cache: not one of a tower of images, nor of the encoder."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    inner = encoder is not None and any(layer is each for each in encoder.modules())
    return not inner and not inspect.signature(layer.plain_class.forward).parameters.keys().isdisjoint(CACHES)


def why_no_cache(layers: Sequence[Any]) -> list[str]:
    """Why swapped layers of one model refuse a cache, if so."""
    needy = [layer for layer in layers if layer.mechanism.cache == "whole sequence"]
    reading = [layer for layer in layers if layer not in needy and set(layer.mechanism.needs) & set(READS)]
    reasons = [f"{_kinds(needy)} needs the whole sequence at each step"] if needy else []
    keeping = [layer for layer in layers if layer.mechanism.remembers and getattr(layer, "is_kv_shared_layer", False)]
    if keeping:
        reasons.append(f"{_kinds(keeping)} remembers something of each token, in layers that have the keys of others")
    if reading and len({_window(layer) for layer in layers} - {None}) > 1:
        reasons.append(
            f"{_kinds(reading)} reads the values of other layers, some of which keep a window of tokens only"
        )
    return reasons


def _kinds(layers: Sequence[Any]) -> str:
    return ", ".join(sorted({type(layer.mechanism).__name__ for layer in layers}))


def _window(layer: Any) -> str | None:
    """Which tokens its cache keeps, in the configuration's words ("sliding_attention"); None where it says nothing."""
    kinds, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    return None if kinds is None or index is None or index >= len(kinds) else kinds[index]
