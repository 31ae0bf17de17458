"""Hugging Face models that use the attention interface.

A swapped layer keeps its class's forward, and reaches its mechanism through an attention function registered under
our name; only the layer's own view of the configuration says so. The model's configuration is untouched, so that the
model goes on building the masks it always built, and its other layers keep their attention implementation.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from attention_modules.hosts.base import Host, Swapped, plain_linear_refusal
from attention_modules.hosts.query import QueryPart, WithoutQuery, query_parts
from attention_modules.hosts.saving import attach_saving
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import AttentionSpec

INTERFACE = "attnswap"
_INPUT = "attnswap_input"  # by which a layer hands its input to our attention function
_UNDERSTOOD = (None, "eager", "sdpa")  # implementations whose masks are None, boolean or additive
_UNSEEN = ("softcap", "position_bias", "cache")  # arguments that change the logits or the keys
# Classes of transformers.models that the tests swap; others share the interface, not all share what lies before it.
_CLASSES = (
    "GPT2Attention",
    "BertSelfAttention",
    "BertCrossAttention",
    "RobertaSelfAttention",
    "RobertaCrossAttention",
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "ViTAttention",
)
_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


def mechanism_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
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
        NotImplementedError: for arguments that no mechanism sees, a mask of another implementation, or a key-value
            cache that the mechanism cannot continue from.
    """
    mechanism = module.mechanism
    unseen = [name for name in _UNSEEN if kwargs.get(name) is not None]
    if unseen:
        raise NotImplementedError(f"{type(mechanism).__name__} cannot honor {', '.join(unseen)}: restore this layer")
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4):
        raise NotImplementedError(
            f"a swapped layer takes masks [B, H, N, M], got {tuple(attention_mask.shape)} "
            f"({type(attention_mask).__name__}), as another attention implementation makes it: call "
            'model.set_attn_implementation("sdpa")'
        )
    if attention_mask is not None and not mechanism.row_masks:
        attention_mask = _one_row(attention_mask, type(mechanism).__name__)
    if module.num_groups > 1:
        key, value = (tensor.repeat_interleave(module.num_groups, dim=1) for tensor in (key, value))
    # One new token sees every cached one, while SDPA's is_causal would let it see the first only.
    causal = bool(module.is_causal if is_causal is None else is_causal) and attention_mask is None
    causal = causal and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:  # a static cache that is still empty beyond the prompt
        key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
    if not mechanism.uses_query:
        _check_no_adapted_query(module)
        if key.shape[2] != query.shape[2]:
            raise NotImplementedError(
                f"{type(mechanism).__name__} has no query, so it cannot continue from a key-value cache "
                f"({query.shape[2]} new tokens, {key.shape[2]} keys): pass use_cache=False"
            )
        query = key
    # A mechanism with a query that cannot take more keys than queries says so itself.
    weights: list[Tensor] = []
    asked = {"weights": weights} if mechanism.gives_weights and _attentions_asked(kwargs) else {}
    x: Any = kwargs.get(_INPUT)
    out = module.mix(
        query, key, value, x, attn_mask=attention_mask, is_causal=causal, dropout_p=dropout, scale=scaling, **asked
    )
    return out.transpose(1, 2).contiguous(), weights[0] if weights else out.new_empty(*out.shape[:-1], 0)


def _one_row(mask: Tensor, mechanism: str) -> Tensor:
    """A mask of padding, ``[B, 1 or H, 1, M]``, which models write out for every row; on a GPU checked without a sync.

    Raises:
        RuntimeError: if the rows differ.
    """
    first = mask[:, :, :1]
    torch._assert_async((mask == first).all(), f"{mechanism} takes masks of padding alone, and this one has other rows")
    return first


def _attentions_asked(arguments: Mapping[str, object]) -> bool:
    """Whether the caller of the model wants attention maps: said to the layer, or to what collects its outputs."""
    if arguments.get("output_attentions"):
        return True
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():  # which cannot read a context variable
        return False
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


class SwappedHuggingFace(Swapped):
    """A layer with its own forward, whose configuration names our attention function."""

    config: PretrainedConfig
    plain_config: PretrainedConfig
    num_groups: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "x" in self.mechanism.needs:
            kwargs[_INPUT] = args[0] if args else kwargs["hidden_states"]
        return super().forward(*args, **kwargs)


class KeyValueConv1D(WithoutQuery):
    """GPT-2's joint projection without query rows; its forward is split in three, so keys stand in for queries."""

    nf: int

    def forward(self: Any, x: Tensor) -> Tensor:
        keys_values = Conv1D.forward(self, x)
        return torch.cat([keys_values[..., : self.nf // 2], keys_values], dim=-1)


def _definer(cls: type) -> type:
    """The class that a layer's forward comes from."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def _is_known(cls: type) -> bool:
    return cls.__name__ in _CLASSES and cls.__module__.startswith("transformers.models.")


def _forward_arguments(layer: nn.Module) -> set[str]:
    cls = layer.plain_class if isinstance(layer, Swapped) else type(layer)
    return set(inspect.signature(cls.forward).parameters)


class HuggingFaceHost(Host):
    """The listed classes, and subclasses of them that change nothing in the forward."""

    name = "Hugging Face"
    mixin = SwappedHuggingFace

    def concerns(self, kind: type[nn.Module]) -> bool:
        return any(base.__module__.startswith("transformers.models.") for base in kind.__mro__)

    def understands(self, module: nn.Module) -> bool:
        return _is_known(_definer(type(module))) and "forward" not in module.__dict__

    def near_miss(self, module: nn.Module) -> str | None:
        kind = type(module)
        if any(_is_known(base) for base in kind.__mro__):
            return f"unsupported subclass: {kind.__name__} has a forward of its own"
        if kind.__module__.startswith("transformers.models.") and "Attention" in kind.__name__:
            return f"of Hugging Face's classes only these are known: {', '.join(_CLASSES)}"
        return None

    def is_cross(self, layer: Any, parent: nn.Module | None, attribute: str) -> bool:
        kind = layer.plain_class if isinstance(layer, Swapped) else type(layer)
        return bool(getattr(layer, "is_cross_attention", False)) or "CrossAttention" in kind.__name__

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        if self._fused(layer):
            dim, heads, head_dim = layer.embed_dim, layer.num_heads, layer.head_dim
        else:
            query, key, _ = (getattr(layer, name) for name in self._names(layer))
            dim, head_dim = key.in_features, self._head_dim(layer)
            heads = query.out_features // head_dim
        causal = bool(getattr(layer, "is_causal", False))
        return AttentionSpec(dim, heads, head_dim, is_causal=causal, layer_index=layer_index)

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """A ViT has one length, its patches and the class token; learned positions bound that of a text.

        Rope bounds nothing (and its ``max_position_embeddings`` can be 131,072).
        """
        size, patch = (getattr(layer.config, name, None) for name in ("image_size", "patch_size"))
        if isinstance(size, int) and isinstance(patch, int):
            return (size // patch) ** 2 + 1
        if "position_embeddings" in _forward_arguments(layer):
            return None
        return getattr(layer.config, "max_position_embeddings", None)

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        if self._fused(layer):
            return query_parts(layer, "c_attn", layer.embed_dim, {"weight": 1, "bias": 0})
        name = self._names(layer)[0]
        return query_parts(layer, name, getattr(layer, name).out_features, {"weight": 0, "bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        if self._fused(layer):
            width = layer.embed_dim
            start = 0 if getattr(layer, "dropped_query", ()) else width
            query, key = ((layer.c_attn, begin, begin + width) for begin in (0, start))
            return Rows(*query, transposed=True), Rows(*key, transposed=True)
        query, key, _ = (getattr(layer, name) for name in self._names(layer))
        return Rows(query, 0, query.out_features), Rows(key, 0, key.out_features)

    def groups(self, layer: Any) -> int:
        return int(getattr(layer, "num_key_value_groups", 1))

    def norm(self, layer: Any) -> str | None:
        return None if self._query_norm(layer) is None else "q/k norm"

    def caveat(self, layer: Any) -> str | None:
        return super().caveat(layer) or ("rope: the spectrum of the logits is not W's" if self.rotates(layer) else None)

    def refusal(self, layer: Any) -> str | None:
        config = layer.plain_config if isinstance(layer, SwappedHuggingFace) else layer.config
        if config._attn_implementation not in _UNDERSTOOD:
            return (
                f"its model uses {config._attn_implementation!r}, whose masks a mechanism cannot read: call "
                'model.set_attn_implementation("sdpa") first'
            )
        return None

    def rotates(self, layer: Any) -> bool:
        return "position_embeddings" in _forward_arguments(layer)

    def input_refusal(self, layer: Any) -> str | None:
        if "kwargs" in _forward_arguments(layer):
            return None
        return "its forward hands nothing further to the attention interface (it takes no **kwargs)"

    def query_refusal(self, layer: Any) -> str | None:
        norm = self._query_norm(layer)
        if norm is not None:
            return f"it normalizes queries ({norm}), whose weights would train nothing; use a mechanism with a query"
        owners: dict[str, type[nn.Module]] = (
            {"c_attn": Conv1D} if self._fused(layer) else {self._names(layer)[0]: nn.Linear}
        )
        return super().query_refusal(layer) or plain_linear_refusal(layer, owners)

    def settle(self, model: nn.Module) -> None:
        attach_saving(model)

    def insert(self, layer: Any, mechanism: Any) -> None:
        plain = not isinstance(layer, SwappedHuggingFace)
        super().insert(layer, mechanism)
        if plain:
            layer.plain_config = layer.config
            layer.config = copy.copy(layer.config)
            layer.config._attn_implementation_internal = INTERFACE
            layer.num_groups = self.groups(layer)

    def remove(self, layer: Any) -> None:
        super().remove(layer)
        layer.config = layer.plain_config
        del layer.plain_config, layer.num_groups

    def _drop_query(self, layer: Any) -> None:
        super()._drop_query(layer)
        if self._fused(layer):
            layer.c_attn.__class__ = KeyValueConv1D

    def _restore_query(self, layer: Any) -> None:
        if self._fused(layer) and layer.dropped_query:
            layer.c_attn.__class__ = Conv1D
        super()._restore_query(layer)

    @staticmethod
    def _fused(layer: nn.Module) -> bool:
        return "c_attn" in layer._modules

    @staticmethod
    def _names(layer: nn.Module) -> tuple[str, str, str]:
        """Attributes of the separate query, key and value projections."""
        return next(names for names in _SEPARATE if names[0] in layer._modules)

    @staticmethod
    def _head_dim(layer: Any) -> int:
        return layer.head_dim if hasattr(layer, "head_dim") else layer.attention_head_size

    @staticmethod
    def _query_norm(layer: nn.Module) -> str | None:
        return "q_norm" if "q_norm" in layer._modules else None


HOSTS: tuple[Host, ...] = (HuggingFaceHost(),)
