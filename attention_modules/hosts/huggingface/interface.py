"""The attention function of swapped layers, and its place in transformers' attention interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attention_modules.hosts.huggingface.batching import paged
from attention_modules.hosts.huggingface.caches import kept_for, keys_of_new
from attention_modules.hosts.huggingface.columns import check_sequences
from attention_modules.hosts.huggingface.given import (
    MASKS,
    OF_LOGITS,
    UNSEEN,
    bounded,
    causal_mask,
    given_of,
    with_key,
    with_masks,
)
from attention_modules.hosts.huggingface.source import InterfaceCall, interface_call
from attention_modules.hosts.huggingface.states import STATE, mixed
from attention_modules.hosts.query import WithoutQuery
from attention_modules.hosts.weights import trained_instead
from attention_modules.mechanisms.shared.shown import ShownMap
from attention_modules.sharing import as_before

_UNDERSTOOD = ("eager", "sdpa")  # implementations whose masks are None, boolean or additive
INTERFACE = "attnswap"
INPUT = "attnswap_input"  # by which a layer hands its input to our attention function
WINDOWS = "attnswap_windows"  # and the mask [windows of an image, N, N] of shifted windows


def mechanism_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of swapped layers.

    Softmax gives its attention map where the caller asks for attentions; else there is one without keys in its place.

    Args:
        module: the swapped layer.
        query: ``[B, H, N, d]``.
        key: ``[B, H / groups, M, d]``, the cached ones included.
        value: ``[B, H / groups, M, d]``.
        attention_mask: boolean (True = may be seen) or additive ``[B, 1 or H, N, M]``; None = all, or causal.
        dropout: attention dropout, 0 outside training.
        scaling: factor on the logits.
        is_causal: in place of the layer's own ``is_causal`` where given.

    Returns:
        ``[B, N, H, d]``, and the map ``[B, H, N, M]``, or an empty one ``[B, H, N, 0]``: ``output_attentions`` drops
        None, which would shift the maps of the other layers.

    Raises:
        NotImplementedError: for arguments that the mechanism cannot honor, a mask of another implementation, or a
            key-value cache that the mechanism cannot continue from.
        RuntimeError: if queries are others than the mechanism was built for.
    """
    mechanism = module.mechanism
    if unread := unread_masks(module.plain_config):  # chosen after the swap: without masks the future would be seen
        raise NotImplementedError(f"a swapped layer cannot act: {unread}")
    _check_given(mechanism, kwargs, attention_mask)
    said = {} if is_causal is None else {"is_causal": is_causal}
    own = {name: given for name, given in kwargs.items() if name != WINDOWS}
    plain = _Plain.of(
        module, (query, key, value, attention_mask), {"dropout": dropout, "scaling": scaling, **said, **own}
    )
    if attention_mask is not None and kwargs.get(WINDOWS) is not None:  # whose -100 hides for softmax alone
        hidden = kwargs[WINDOWS] < -50
        hidden = hidden.repeat(query.shape[0] // hidden.shape[0], 1, 1).unsqueeze(1)
        attention_mask = attention_mask.masked_fill(hidden, float("-inf"))
    own_keys, cache = key, kwargs.get("cache")
    implementation = getattr(module.plain_config, "_attn_implementation", None) or ""
    if cache is None and implementation.startswith("paged|"):
        raise ValueError(f"{implementation!r} was called without a paged attention cache: take generate_batch()")
    if cache is not None:
        key, value, attention_mask = paged(module, cache, key, value, attention_mask, kwargs)
    if attention_mask is not None and not mechanism.row_masks and mechanism.cache != "state":
        attention_mask = _one_row(attention_mask, type(mechanism).__name__)
    _check_shapes(module, query, key)
    remembered: dict[str, Tensor] = {}
    if mechanism.remembers:
        new = mechanism.remember(_input_of(kwargs.get(INPUT), query))
        remembered["kept"] = kept_for(kwargs, module, new, key.shape[2])
    if not mechanism.uses_query:
        _check_no_adapted_query(module)
        scaling = module.without_query_scale(scaling, query)
        if cache is not None:
            query = own_keys
        elif mechanism.cache != "whole sequence":
            query = keys_of_new(kwargs, module, key, query.shape[2])
    elif not mechanism.softmax_like and module.query_factor != 1.0:  # to which it may make a difference
        query, scaling = query / module.query_factor, module.without_query_scale(scaling, query)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if mechanism.cache == "state":
        out = _with_state(module, query, key, value, attention_mask, is_causal, kwargs, dropout, scaling)
        return out.transpose(1, 2).contiguous(), out.new_empty(*out.shape[:-1], 0)
    # One new token sees every cached one, while SDPA's is_causal would let it see the first only.
    causal = attention_mask is None and query.shape[2] > 1 and module.hides_the_future(is_causal)
    if causal and key.shape[2] > query.shape[2]:  # a static cache that is still empty beyond the prompt
        key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
        remembered = {name: kept[..., : query.shape[2]] for name, kept in remembered.items()}
    if mechanism.cache == "whole sequence":
        _check_whole(mechanism, query, key)
        if mechanism.counts_columns or mechanism.counts_distances:
            check_sequences(module, attention_mask, kwargs.get("position_ids"), kwargs.get("sliding_window"))
        query = query if mechanism.uses_query else key
    if causal and given_of(kwargs, (*MASKS, *OF_LOGITS)):
        attention_mask, causal = causal_mask(query, key), False
    attention_mask = with_masks(attention_mask, key, kwargs)
    if kwargs.get("softcap") is not None:
        attention_mask = bounded(attention_mask, query, key, scaling, kwargs["softcap"])
    keys = key.shape[2]
    for name in given_of(kwargs, ("s_aux", "sinks")):
        attention_mask, key, value = with_key(attention_mask, query, key, value, kwargs[name])
    weights = ShownMap(keys)
    asked: dict[str, Any] = {}
    if mechanism.gives_weights:
        # Nobody collects the outputs of a checkpointed part of the model when backward computes it again.
        wanted = as_before(module, _attentions_asked(module, kwargs))
        asked = {"weights": weights} if wanted else {}
    if plain is not None:
        asked["plain"], plain.sent = plain, (query, key, value)
    x: Any = _input_of(kwargs.get(INPUT), query) if "x" in mechanism.needs else None
    out = module.mix(
        query,
        key,
        value,
        x,
        attn_mask=attention_mask,
        is_causal=causal,
        dropout_p=dropout,
        scale=scaling,
        **asked,
        **remembered,
    )
    nothing = None if mechanism.gives_weights else out.new_empty(*out.shape[:-1], 0)
    if plain is not None and plain.out is not None and out is plain.handed:  # else a hook has put another in its place
        return plain.out
    return out.transpose(1, 2).contiguous(), nothing if weights.shown is None else weights.shown


class _Plain:
    """The call that a layer makes which is only watched.

    Args:
        call: of the plain layer's attention function.
    """

    def __init__(self, call: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        self.call = call
        self.sent: tuple[Tensor, ...] = ()
        self.out: tuple[Tensor, Tensor | None] | None = None
        self.handed: Tensor | None = None

    def __call__(self, *handed: Tensor) -> Tensor | None:
        """Its output, ``[B, H, N, d]``; None for others than were sent, by which a penalty enters."""
        if any(one is not other for one, other in zip(handed, self.sent, strict=True)):
            return None
        self.out = self.call()
        self.handed = self.out[0].transpose(1, 2)
        return self.handed

    @classmethod
    def of(cls, module: Any, tensors: Sequence[Tensor | None], arguments: Mapping[str, Any]) -> _Plain | None:
        """What a layer is to compute with q, k, v and the mask; None where it is swapped, compiled, or has another mask
        for our function than for its own.
        """
        if not module.mechanism.stands_in or torch.compiler.is_compiling() or given_of(arguments, ("cache", "indices")):
            return None
        call = interface_call(module.plain_class)
        assert isinstance(call, InterfaceCall)
        function = call.function(module.plain_config._attn_implementation)
        return None if function is None else cls(partial(function, module, *tensors, **arguments))


def shifts(layer: Any) -> bool:
    """Whether a layer attends in windows that every other block shifts, as Swin's does."""
    return getattr(type(layer), "plain_class", type(layer)).__name__ == "SwinAttention"


def unread_masks(config: Any) -> str | None:
    """Why a mechanism cannot be given the masks that a model makes, if so."""
    implementation = config._attn_implementation
    if implementation is None or implementation.removeprefix("paged|") in _UNDERSTOOD:
        return None
    return (
        f"its model uses {implementation!r}, whose masks a mechanism cannot read: call "
        'model.set_attn_implementation("sdpa") first'
    )


def _with_state(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    arguments: dict[str, Any],
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """What a mechanism gives that keeps a state of earlier tokens: ``[B, H, N, d]``."""
    mechanism, layer = module.mechanism, arguments.get(STATE)
    _check_whole(mechanism, query, key)
    x = _input_of(arguments.get(INPUT), query) if "x" in mechanism.needs else None
    own = bool(getattr(module, "is_causal", mechanism.spec.is_causal))
    # Layers say is_causal=False beside a mask that hides the future, and of one new token.
    causal = (own if is_causal is None else is_causal) or (own and (mask is not None or query.shape[2] == 1))
    given = {"q": query, "k": key, "v": value, "x": x}
    positions = arguments.get("position_ids")
    return mixed(module, layer, given, mask, positions, causal, dropout_p=dropout, scale=scaling)


def _name(mechanism: Any) -> str:
    """That of its class, where peft wraps it too."""
    return type(trained_instead(mechanism)).__name__


def _check_given(mechanism: Any, arguments: Mapping[str, Any], mask: object) -> None:
    """Refuse what the mechanism cannot be given."""
    unseen = given_of(arguments, UNSEEN)
    if not mechanism.softmax_like:
        unseen += given_of(arguments, OF_LOGITS)
    if not mechanism.row_masks:
        unseen += given_of(arguments, MASKS)
    if unseen:
        raise NotImplementedError(f"{_name(mechanism)} cannot honor {', '.join(unseen)}: restore this layer")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        raise NotImplementedError(
            f"a swapped layer takes masks [B, H, N, M], got {tuple(getattr(mask, 'shape', ()))} "
            f"({type(mask).__name__}), as another attention implementation makes it: call "
            'model.set_attn_implementation("sdpa")'
        )


def _check_whole(mechanism: Any, query: Tensor, key: Tensor) -> None:
    """Refuse other tokens than those of this call."""
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"{_name(mechanism)} needs one query for each key, and here {query.shape[2]} tokens have "
            f"{key.shape[2]} keys: it cannot continue from a key-value cache (pass use_cache=False; for prefix tuning, "
            "whose prefix is such a cache, take prompt tuning or LoRA), nor attend to another or a reduced sequence "
            "(restore that layer)"
        )


def _check_shapes(module: Any, query: Tensor, key: Tensor) -> None:
    """Refuse other heads than the mechanism was told of."""
    spec, processes = module.mechanism.spec, 1 if module.head_mesh is None else module.head_mesh.size()
    told, found = (spec.num_heads // processes, spec.head_dim), (query.shape[1], query.shape[3])
    if told != found or query.shape[1] % key.shape[1] or key.shape[3] != query.shape[3]:
        raise RuntimeError(
            f"{type(module).__name__} gives the attention interface {found[0]} heads of width {found[1]} "
            f"({key.shape[1]} of keys), and its mechanism was built for {told[0]} of width {told[1]}: leave this layer "
            "out of the swap; where tensor parallelism spread its heads since, spread the model first and swap then"
        )


def _input_of(x: Any, query: Tensor) -> Tensor:
    """The layer's input, where its tokens are those of the queries: ``[B, N, C]``."""
    if isinstance(x, Tensor) and x.dim() == 2 and query.shape[0] == 1:
        x = x[None]  # packed images without a batch
    if not isinstance(x, Tensor) or x.shape[:-1] != (query.shape[0], query.shape[2]):
        raise NotImplementedError(
            f"the mechanism needs the layer's input [B, N, C], and this layer arranges its tokens anew: input "
            f"{tuple(getattr(x, 'shape', ()))}, queries {tuple(query.shape)}; choose a mechanism without, or leave "
            "this layer out of the swap"
        )
    return x


def _one_row(mask: Tensor, mechanism: str) -> Tensor:
    """A mask of padding, ``[B, 1 or H, 1, M]``, which models write out for every row; on a GPU checked without a sync.

    Raises:
        RuntimeError: if the rows differ.
    """
    first = mask[:, :, :1]
    torch._assert_async((mask == first).all(), f"{mechanism} takes masks of padding alone, and this one has other rows")
    return first


def _attentions_asked(module: Any, arguments: Mapping[str, object]) -> bool:
    """Whether maps are wanted: said to the layer, or to what collects its outputs, or by the eager implementation.

    With that one the plain layer gives its map at every call, which users' hooks may read.
    """
    if arguments.get("output_attentions") or module.plain_config._attn_implementation == "eager":
        return True
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is None:
        return False
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        # The model around is not compiled, and only its own code can read who collects.
        return any(getattr(hook, "__name__", "") == "output_capturing_hook" for hook in module._forward_hooks.values())
    return any(name.endswith("attentions") for name in collector.get() or ())


def _check_no_adapted_query(module: Any) -> None:
    """Refuse what somebody wrapped around a query projection that has no weights: it would train nothing."""
    for part in module.dropped_query:
        owner = module.get_submodule(part.owner)
        sharded = type(owner).__module__.startswith("torch.distributed.")
        if not isinstance(owner, WithoutQuery) and not sharded:
            raise RuntimeError(
                f"the query projection {part.owner!r} was replaced by a {type(owner).__name__} after the swap, but "
                "its mechanism uses no query: adapt other projections, or call restore_attention() first"
            )


AttentionInterface.register(INTERFACE, mechanism_attention_forward)
# Without a mask function of the same name, a causal model hands over None whatever is hidden.
AttentionMaskInterface.register(INTERFACE, sdpa_mask)
