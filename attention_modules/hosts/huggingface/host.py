"""The host of every layer that calls transformers' attention interface.

A swapped layer keeps its class's forward, and reaches its mechanism through an attention function registered under
our name; only the layer's own view of the configuration says so. The model's configuration is untouched, so that the
model goes on building the masks it always built, and its other layers keep their attention implementation.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from attention_modules.base import AttentionMechanism
from attention_modules.hosts.base import Host, Swapped, plain_linear_refusal
from attention_modules.hosts.forwards import has_other_forward
from attention_modules.hosts.huggingface.batching import attach_batching
from attention_modules.hosts.huggingface.caches import CACHE, warn_of_cache
from attention_modules.hosts.huggingface.cross import attends_elsewhere
from attention_modules.hosts.huggingface.given import MASKS, OF_LOGITS, WITHOUT_EFFECT
from attention_modules.hosts.huggingface.initial import attach_initial
from attention_modules.hosts.huggingface.interface import INPUT, INTERFACE, WINDOWS, shifts, unread_masks
from attention_modules.hosts.huggingface.positions import watch_positions
from attention_modules.hosts.huggingface.projections import (
    Joint,
    groups_of,
    heads_of,
    joint,
    layout_refusal,
    query_projection,
    separate,
    width_of,
    with_query,
    without_query,
)
from attention_modules.hosts.huggingface.queries import query_path
from attention_modules.hosts.huggingface.saving import attach_saving
from attention_modules.hosts.huggingface.source import InterfaceCall, calls_interface, interface_call
from attention_modules.hosts.huggingface.states import STATE, attach_states, state_layer
from attention_modules.hosts.limits import SHIFTED, Limits
from attention_modules.hosts.model.heads import fan_out, held_here, mesh_of, spread_refusal
from attention_modules.hosts.model.inputs import CACHES
from attention_modules.hosts.query import QueryPart, query_parts
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import AttentionSpec

_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|pos_embed|embed_positions|wpe)(\.weight)?$")
_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")


class SwappedHuggingFace(Swapped):
    """A layer with its own forward, whose configuration names our attention function."""

    config: PretrainedConfig
    plain_config: PretrainedConfig
    query_factor: float = 1.0
    masks_tokens = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.mechanism.uses_query:
            self._check_own_sequence(args, kwargs)
        if "x" in self.mechanism.needs:
            x = args[0] if args else kwargs.get(_forward_of(self.plain_class)[0][0])
            several = self.head_mesh is not None
            kwargs[INPUT] = fan_out(x, self.head_mesh) if several and isinstance(x, Tensor) else x
        if shifts(self):
            kwargs[WINDOWS] = _named(_forward_of(self.plain_class)[0], args, kwargs).get("attention_mask")
        of_earlier = not self.mechanism.uses_query or self.mechanism.remembers or self.mechanism.cache == "state"
        if self.mechanism.cache != "whole sequence" and of_earlier:
            kwargs |= self._cache(args, kwargs)
        if self.head_mesh is None:
            return super().forward(*args, **kwargs)
        with held_here(self.mechanism):
            return super().forward(*args, **kwargs)

    def hides_the_future(self, asked: bool | None) -> bool:
        """Whether a call without a mask is causal, as the layer's own attention function would have it."""
        if self.plain_config._attn_implementation != "sdpa":
            return False
        return bool(getattr(self, "is_causal", True) if asked is None else asked)

    def without_query_scale(self, scale: float | None, q: Tensor) -> float | None:
        """The factor on the logits, with what the forward multiplies its queries by."""
        if self.query_factor == 1.0:
            return scale
        return self.query_factor * (q.shape[-1] ** -0.5 if scale is None else scale)

    def _cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The cache that the layer is called with, for our attention function, where its forward passes it on.

        Raises:
            NotImplementedError: if the mechanism keeps a state there, and cannot.
        """
        names, passes_on = _forward_of(self.plain_class)
        given = _named(names, args, kwargs)
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        if cache is None:
            return {}
        if self.mechanism.cache != "state":
            return {CACHE: cache} if passes_on else {}
        if not passes_on:
            raise NotImplementedError(
                f"{type(self.mechanism).__name__} keeps a state, and {self.plain_class.__name__} does not hand its "
                "cache on to the attention interface (no **kwargs): pass use_cache=False"
            )
        return {STATE: state_layer(cache, self)}

    def _check_own_sequence(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _named(_forward_of(self.plain_class)[0], args, kwargs)
        other = [name for name in _OTHER_SEQUENCE if given.get(name) is not None]
        if other:
            raise RuntimeError(
                f"{type(self.mechanism).__name__} has no query, so this layer can only attend to its own input; it was "
                f"called with {other[0]}: restore it, or choose a mechanism with a query"
            )


def _kind(layer: nn.Module) -> type[nn.Module]:
    return layer.plain_class if isinstance(layer, Swapped) else type(layer)


_ROPE = "rope: the spectrum of the logits is not W's"


def _call_of(layer: nn.Module) -> InterfaceCall:
    call = interface_call(_kind(layer))
    assert isinstance(call, InterfaceCall)
    return call


@torch.compiler.assume_constant_result  # what reads source text would break the graph
def _forward_of(kind: type[nn.Module]) -> tuple[tuple[str, ...], bool]:
    """The names of a forward's parameters, and whether it passes on its ``**kwargs`` to the interface."""
    call = interface_call(kind)
    assert isinstance(call, InterfaceCall)
    return tuple(call.parameters), call.passes_on


def _named(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its parameters."""
    names = names[: len(args)]  # no `zip(..., strict=...)`, which torch 2.6 cannot compile
    return {**{name: args[place] for place, name in enumerate(names)}, **kwargs}


def _value(layer: nn.Module, source: str) -> object:
    """What a source of the forward is in this layer, where it is an attribute or None; else the source."""
    name = source.removeprefix("self.")
    if name != source and name.isidentifier():
        return getattr(layer, name, None)
    return {"None": None, "False": False, "True": True}.get(source, source)


def _given(layer: nn.Module, names: Sequence[str]) -> list[str]:
    """Which of these arguments the layer hands to the attention interface, as far as its class and attributes say."""
    given = _call_of(layer).given
    return [name for name in names if name in given and _value(layer, given[name]) is not None]


def _query_factor(layer: nn.Module) -> float | None:
    """The number that the forward multiplies its queries by; None where it computes something else of them."""
    path = query_path(_call_of(layer))
    return None if path.other is not None else path.factor(layer)


@functools.cache
def _is_softmax(function: Callable[..., Any]) -> bool:
    """Whether an attention function is softmax attention, tried on random numbers."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=generator, device="cpu", dtype=torch.float32)
    sinks = torch.full((2,), float("-inf"), device="cpu", dtype=torch.float32)
    layer = SimpleNamespace(training=False, num_key_value_groups=1, head_dim=4, is_causal=False, sinks=sinks)
    mask = torch.zeros(1, 1, 5, 5, device="cpu", dtype=torch.float32)
    try:
        out = function(layer, q, k, v, mask, scaling=0.5, dropout=0.0)[0]
    except Exception:  # it reads what no known attention function does
        return False
    return torch.allclose(out, F.scaled_dot_product_attention(q, k, v).transpose(1, 2), atol=1e-5)


class HuggingFaceHost(Host):
    """Layers whose forward calls the attention interface, of transformers or of anybody."""

    name = "Hugging Face"
    mixin = SwappedHuggingFace
    spreads_heads = True
    tells_causality = True

    def concerns(self, kind: type[nn.Module]) -> bool:
        return calls_interface(kind) or any(base.__module__.startswith("transformers.models.") for base in kind.__mro__)

    def understands(self, module: nn.Module) -> bool:
        return calls_interface(type(module)) and self._unfit(module) is None

    def near_miss(self, module: nn.Module) -> str | None:
        kind = type(module)
        if calls_interface(kind):
            return self._unfit(module)
        if any(calls_interface(base) for base in kind.__mro__ if issubclass(base, nn.Module)):
            return f"unsupported subclass: {kind.__name__} has a forward of its own"
        if kind.__module__.startswith("transformers.models.") and "Attention" in kind.__name__:
            return "its forward does not call transformers' attention interface"
        return None

    def scale(self, layer: Any) -> float | None:
        try:
            given: Any = eval(_call_of(layer).given.get("scaling", "None"), {"__builtins__": {}}, {"self": layer})
        except (NameError, AttributeError):  # the forward makes it
            given = getattr(layer, "scaling", None)
        factor, heads = _query_factor(layer), heads_of(layer)
        if factor is None or heads is None:
            return None
        return factor * (given if isinstance(given, int | float) else heads[1] ** -0.5)

    @staticmethod
    def _unfit(module: nn.Module) -> str | None:
        """Why nothing can be put into a layer that calls the interface, if so."""
        if has_other_forward(module):
            return "its forward was replaced"
        call = interface_call(type(module))
        if isinstance(call, str):
            return call
        unseen = _given(module, [name for name in call.given if name not in (*MASKS, *OF_LOGITS, *WITHOUT_EFFECT)])
        if unseen:
            return f"it hands {', '.join(unseen)} to the attention interface, which no mechanism is given"
        if not isinstance(getattr(module, "config", None), PretrainedConfig):
            return "it has no configuration of its own in which another attention function could be named"
        if heads_of(module) is None:
            return "it does not say how many heads it has, and how wide they are"
        return None

    def is_cross(self, layer: Any, parent: nn.Module | None, name: str) -> bool:
        return attends_elsewhere(layer, parent, name)

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        sizes = heads_of(layer)
        assert sizes is not None
        value = getattr(layer, "v_head_dim", None)
        given = _call_of(layer).given
        causal = _value(layer, given.get("is_causal", "self.is_causal")) is not False
        return AttentionSpec(
            width_of(layer),
            *sizes,
            is_causal=bool(causal and getattr(layer, "is_causal", "is_causal" in given)),
            layer_index=layer_index,
            value_dim=value if value != sizes[1] else None,
        )

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """The learned positions of the innermost module around the layer that has some: there are no more tokens."""
        found = _positions(ancestors)
        return None if found is None else found[1]

    def fixes_length(self, ancestors: Sequence[nn.Module]) -> bool:
        """Where positions are those of patches: an image of another size has the same columns elsewhere."""
        found = _positions(ancestors)
        return found is not None and any(name.startswith("patch_embed") for name in found[0]._modules)

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        names = separate(layer)
        if names is None:
            return Joint.of(layer).parts(layer)
        return query_parts(layer, names[0], getattr(layer, names[0]).out_features, {"weight": 0, "bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        names = separate(layer)
        if names is None:
            return Joint.of(layer).rows(layer)
        query, key = (getattr(layer, name) for name in names[:2])
        return Rows(query, 0, query.out_features), Rows(key, 0, key.out_features)

    def weights_refusal(self, layer: Any) -> str | None:
        name, sizes = query_projection(layer), heads_of(layer)
        if name is None or sizes is None:
            return "its projections to queries and keys have no names that are known"
        if reason := layout_refusal(layer):
            return reason
        if (names := separate(layer)) is None:
            return None
        owners = {each: getattr(layer, each) for each in names[:2]}
        if unknown := [each for each, owner in owners.items() if not hasattr(owner, "out_features")]:
            kind = type(owners[unknown[0]]).__name__
            return f"its projection {unknown[0]!r} is a {kind}, whose weights are not known"
        return self._width_refusal(layer, name, sizes)

    def groups(self, layer: Any) -> int:
        return groups_of(layer)

    def norm(self, layer: Any) -> str | None:
        """Also one without weights, as Llama 4's, is one; of what a low-rank projection has between its parts none."""
        norms = (each for name, each in layer._modules.items() if re.match(r"[qk](?!\w*_a_)\w*norm", name))
        return "q/k norm" if any(each is not None and not isinstance(each, nn.Identity) for each in norms) else None

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or (_ROPE if _call_of(layer).rotates else None)

    def limits(self, layer: Any) -> Limits:
        call, masks = _call_of(layer), _given(layer, MASKS)
        unread = (
            None if call.passes_on else "its forward hands nothing further to the attention interface (no **kwargs)"
        )
        rows = f"it hands {', '.join(masks)} to its attention, a mask with other rows" if masks else None
        several = "it attends several times in a call, to other values each time" if call.times > 1 else None
        return Limits(
            self._every(layer),
            lambda mechanism: next(filter(None, (each(layer, mechanism) for each in _REFUSALS)), None),
            without_rows=rows,
            with_input=unread,
            without_query=self._query(layer, super().limits(layer).without_query),
            sharing=several or (SHIFTED if shifts(layer) else None),
            rotates=call.rotates,
        )

    def _every(self, layer: Any) -> str | None:
        config = layer.plain_config if isinstance(layer, SwappedHuggingFace) else layer.config
        if unread := unread_masks(config):
            return unread
        if separate(layer) is None and mesh_of(layer) is not None:
            return (
                "its weights are spread over processes (tensor parallelism), and only those of separate projections to "
                "queries, keys and values are known to be so by heads: load it without tp_plan, and take DDP or FSDP2"
            )
        function = _call_of(layer).function(config._attn_implementation)
        if function is not None and not _is_softmax(function):
            return f"{function.__module__}.{function.__name__}, which it calls, is no softmax attention"
        return None

    def _query(self, layer: Any, grouped: str | None) -> str | None:
        if mesh_of(layer) is not None:
            return (
                "its query projection is spread over processes (tensor parallelism), and is not taken out there; use a "
                "mechanism with a query, or load the model without tp_plan, and take DDP or FSDP2"
            )
        norm = _norm(layer)
        if norm is not None:
            return f"it normalizes queries ({norm}), whose weights would train nothing; use a mechanism with a query"
        name, sizes = query_projection(layer), heads_of(layer)
        if name is None or sizes is None:
            return "its projections to queries and keys have no names that are known; use a mechanism with a query"
        return (
            grouped
            or layout_refusal(layer)
            or self._width_refusal(layer, name, sizes)
            or _path_refusal(layer, name)
            or plain_linear_refusal(layer, {name: Conv1D if name == "c_attn" else nn.Linear})
        )

    @staticmethod
    def _width_refusal(layer: Any, name: str, sizes: tuple[int, int]) -> str | None:
        """Why a projection does not make the queries alone (or queries, keys and values of as many heads), if so."""
        owner, heads = getattr(layer, name), sizes[0] * sizes[1]
        width = getattr(owner, "out_features", getattr(owner, "nf", None))
        expected = heads if separate(layer) is not None else heads + 2 * (heads // groups_of(layer))
        if width is not None and width != expected:
            return f"its projection {name!r} gives {width} features and not {expected}: it makes something else too"
        return None

    def settle(self, model: nn.Module) -> None:
        attach_saving(model)
        attach_batching(model)
        attach_states(model)
        attach_initial(model)
        watch_positions(model)
        warn_of_cache(model, SwappedHuggingFace)

    def insert(self, layer: Any, mechanism: Any) -> None:
        plain = not isinstance(layer, SwappedHuggingFace)
        super().insert(layer, mechanism)
        if plain:
            layer.plain_config = layer.config
            layer.config = copy.copy(layer.config)
            layer.config._attn_implementation_internal = INTERFACE
        layer.query_factor = _query_factor(layer) or 1.0

    def remove(self, layer: Any) -> None:
        super().remove(layer)
        layer.config = layer.plain_config
        del layer.plain_config
        vars(layer).pop("query_factor", None)  # of a layer that was pickled before there was one

    def _drop_query(self, layer: Any) -> None:
        name = query_projection(layer)
        assert name is not None
        super()._drop_query(layer)
        if joint(layer) == name:
            without_query(layer, name)

    def _restore_query(self, layer: Any) -> None:
        if layer.dropped_query:
            with_query(layer.get_submodule(layer.dropped_query[0].owner))
        super()._restore_query(layer)


def _positions(ancestors: Sequence[nn.Module]) -> tuple[nn.Module, int] | None:
    """The module that holds the learned positions nearest around a layer, and for how many tokens; None without.

    It stands around the layer, or beside what does; a tower beside that has positions of its own tokens.
    """
    for ancestor in reversed(ancestors):
        for name, parameter in ancestor.named_parameters():
            if (match := _POSITIONS.search(name)) and parameter.dim() in (2, 3):
                owner = ancestor.get_submodule(name[: match.start()])
                tower = any(calls_interface(type(each)) for each in owner.modules())
                if owner is not ancestor and (tower or owner not in ancestor.children()):
                    continue
                if "num_prefix_tokens" in vars(owner):  # EoMT: queries join between layers
                    return None
                more = owner._parameters.get("register_tokens")
                return owner, parameter.shape[-2] + (0 if more is None else more.shape[-2])
    return None


def _norm(layer: nn.Module) -> str | None:
    """A module of the layer that normalizes queries before the product, with weights of its own."""
    norms = (name for name in layer._modules if re.match(r"q\w*norm", name))
    return next((name for name in norms if any(True for _ in getattr(layer, name).parameters())), None)


def _bounded(layer: Any, mechanism: AttentionMechanism) -> str | None:
    bounds = _given(layer, OF_LOGITS)
    if not bounds or mechanism.softmax_like:
        return None
    return (
        f"it hands {', '.join(bounds)} to its attention, which changes its logits or their sum, and which "
        f"{type(mechanism).__name__} cannot honor: choose a mechanism that is like softmax (softmax, sink, gated, "
        "entmax, hard)"
    )


def _spread(layer: Any, mechanism: AttentionMechanism) -> str | None:
    """Why a mechanism has no place among heads that are spread over processes, if so."""
    mesh, sizes = mesh_of(layer), heads_of(layer)
    if mesh is None or sizes is None:
        return None
    return spread_refusal(mechanism, sizes[0], sizes[0] // groups_of(layer), mesh)


def _shares_keys(layer: Any, mechanism: AttentionMechanism) -> str | None:
    """Why a mechanism that keeps no keys has no place in a layer, if so."""
    if mechanism.cache != "state":
        return None
    if any(getattr(layer, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv")):
        why = f"other layers share its keys and values, and {type(mechanism).__name__} keeps a state in their place"
    elif _call_of(layer).times > 1:
        why = f"it attends several times in a call, and {type(mechanism).__name__} keeps one state, of one attention"
    else:
        return None
    return f"{why}: choose another mechanism, or leave this layer out of the swap"


def _unsaid(layer: Any, mechanism: AttentionMechanism) -> str | None:
    """Why a mechanism that must know whether the future is hidden has no place in a layer, if so."""
    must_know = mechanism.cache == "state" or mechanism.causality != "any"
    if not must_know or hasattr(layer, "is_causal") or "is_causal" in _call_of(layer).given:
        return None
    return (
        f"it does not say whether it hides the future, and {type(mechanism).__name__} must know: set its is_causal to "
        "True or False before the swap"
    )


_REFUSALS = _unsaid, _bounded, _spread, _shares_keys


def _path_refusal(layer: nn.Module, projection: str) -> str | None:
    """Why keys cannot stand in for queries at the interface, if so."""
    names, call = separate(layer), _call_of(layer)
    if names is not None:
        queries, keys = (call.projected_from(name) for name in names[:2])
        if len(queries) != 1 or (queries != keys and keys != {"current_states"}):
            made_of = f"its queries are made of {_either(queries)} and its keys of {_either(keys)}"
            return f"{made_of}; use a mechanism with a query"
    path = query_path(call)
    if _query_factor(layer) is None:
        what = path.other or " * ".join(path.factors)
        return f"its forward computes {what!r} for queries alone, which keys cannot stand in for"
    own = {name.partition(".")[0] for name, _ in layer.named_parameters()} - {projection}
    made = sorted(name for name in own if re.match("q(uery)?_", name))
    if made:
        return f"its {made[0]!r} is for queries alone, and would train nothing; use a mechanism with a query"
    return None


def _either(sources: set[str]) -> str:
    return " or ".join(sorted(sources)) or "what is not seen"


HOSTS: tuple[Host, ...] = (HuggingFaceHost(),)
