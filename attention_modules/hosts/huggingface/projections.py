"""How many heads a layer has, and which of its projections make queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from attention_modules.hosts.forwards import definer
from attention_modules.hosts.projections import commonest
from attention_modules.hosts.query import QueryPart, WithoutQuery, become, query_parts
from attention_modules.hosts.weights import Rows

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("linear_q", "linear_k", "linear_v"),
    ("Wq", "Wk", "Wv"),
    ("to_q", "to_k", "to_v"),
)
# Joint projections: first all queries, then all keys; or each head's query, key and value together.
_JOINT = {"qkv": False, "Wqkv": False, "qkv_proj": False, "c_attn": False, "query_key_value": True}
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_WIDTHS = ("embed_dim", "hidden_size", "d_model", "dim")


def _first_size(holder: object, names: Iterable[str]) -> int | None:
    """The first of these attributes that is a size."""
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def separate(layer: nn.Module) -> tuple[str, str, str] | None:
    """Names of the layer's projections to queries, keys and values, where they are three."""
    return next((names for names in _SEPARATE if all(name in layer._modules for name in names)), None)


def joint(layer: nn.Module) -> str | None:
    """Name of the one projection to queries, keys and values."""
    if "q_attn" in layer._modules:  # GPT-2's cross-attention, whose joint projection has no queries
        return None
    return next((name for name in _JOINT if name in layer._modules), None)


def layout_refusal(layer: nn.Module) -> str | None:
    """Why it is not known where a joint projection has its queries and keys, if so: in classes of one's own."""
    name = None if separate(layer) else joint(layer)
    kind = getattr(type(layer), "plain_class", type(layer))
    if name is None or definer(kind).__module__.startswith("transformers."):
        return None
    return (
        f"in which order its {name!r} holds queries, keys and values is not known of a class of your own: say it by "
        "attnswap.declare_host"
    )


def query_projection(layer: nn.Module) -> str | None:
    """Name of the projection that makes the queries, alone or with keys and values, where it is known."""
    names = separate(layer)
    return names[0] if names else joint(layer)


def groups_of(layer: Any) -> int:
    """Query heads that share a key head."""
    groups = getattr(layer, "num_key_value_groups", None)
    if isinstance(groups, int):
        return groups
    names = separate(layer)
    if names is None:
        return 1
    sizes = [[getattr(each, "out_features", 0) for each in getattr(layer, name).modules()] for name in names[:2]]
    # One that is wrapped by hand stands inside.
    queries, keys = (size[0] or commonest([*filter(None, size)] or [1]) for size in sizes)
    return 1 if queries % keys else int(queries // keys)


def heads_of(layer: Any) -> tuple[int, int] | None:
    """Query heads and the width of one; None where the layer does not say."""
    width, heads = _first_size(layer, _HEAD_DIMS), _first_size(layer, _HEADS)
    names = separate(layer)
    if width is None:
        total = _first_size(getattr(layer, names[1]), ("out_features",)) if names else None
        return (heads, total * groups_of(layer) // heads) if heads and total else None
    if heads is None:
        # By keys, as some query projections make a gate too.
        named = [(name, groups) for name, groups in (("k_proj", groups_of(layer)), ("q_proj", 1))]
        named = [(names[1], groups_of(layer))] if names else named
        sizes = [(getattr(layer._modules.get(name), "out_features", 0), groups) for name, groups in named]
        heads = next((size // width * groups for size, groups in sizes if size), None)
    heads = heads or _first_size(getattr(layer, "config", None), _HEADS)
    return None if heads is None else (heads, width)


def width_of(layer: Any) -> int:
    """Width of the layer's input."""
    name = query_projection(layer)
    owner = None if name is None else getattr(layer, name)
    if isinstance(owner, nn.Module) and (size := _first_size(owner, ("in_features", "nx"))):
        return size
    found = _first_size(layer, _WIDTHS) or _first_size(getattr(layer, "config", None), ("hidden_size", "d_model"))
    heads = heads_of(layer)
    assert heads is not None
    return found or heads[0] * heads[1]


@dataclass(frozen=True)
class Joint:
    """Where a joint projection has its queries and keys.

    Args:
        owner: its name.
        queries: features of a block that are queries.
        keys: those that are keys.
        blocks: equal blocks that the features lie in.
        transposed: whether its weight is ``[in, out]``.
    """

    owner: str
    queries: int
    keys: int
    blocks: int
    transposed: bool

    @classmethod
    def of(cls, layer: Any) -> Joint:
        """Those of a layer with a joint projection."""
        name, sizes = joint(layer), heads_of(layer)
        assert name is not None
        assert sizes is not None
        # GPTBigCode's lie head by head where its heads do not share their keys.
        (heads, width), by_head = sizes, _JOINT[name] or getattr(layer, "multi_query", None) is False
        blocks = heads if by_head else 1
        queries = heads * width // blocks
        owner = getattr(layer, name)
        transposed = hasattr(getattr(owner, "base_layer", owner), "nf")  # peft's layers have one inside
        return cls(name, queries, queries // groups_of(layer), blocks, transposed)

    def parts(self, layer: nn.Module) -> tuple[QueryPart, ...]:
        """The query's share of the plain projection."""
        dims = {"weight": int(self.transposed), "bias": 0}
        return query_parts(layer, self.owner, self.queries * self.blocks, dims, self.blocks)

    def rows(self, layer: Any) -> tuple[Rows, Rows]:
        """The rows of queries and of keys, as the projection is now."""
        start = 0 if getattr(layer, "dropped_query", ()) else self.queries
        owner = getattr(layer, self.owner)
        ends = ((0, self.queries), (start, start + self.keys))
        query, key = (Rows(owner, *end, transposed=self.transposed, blocks=self.blocks) for end in ends)
        return query, key


def _keys_for_queries(keys_values: Tensor, blocks: int) -> Tensor:
    """Keys in the place of queries, as the forward takes the projection apart in three."""
    parts = keys_values.unflatten(-1, (blocks, -1))
    return torch.cat([parts[..., : parts.shape[-1] // 2], parts], dim=-1).flatten(-2)


class KeyValueConv1D(WithoutQuery):
    """GPT-2's joint projection without query rows."""

    query_blocks: int

    def forward(self: Any, x: Tensor) -> Tensor:
        return _keys_for_queries(Conv1D.forward(self, x), self.query_blocks)


class KeyValueLinear(WithoutQuery):
    """A joint projection without query rows."""

    weight: Tensor
    bias: Tensor | None
    query_blocks: int
    reset_parameters: Any = nn.Linear.reset_parameters

    def forward(self, x: Tensor) -> Tensor:
        return _keys_for_queries(F.linear(x, self.weight, self.bias), self.query_blocks)


def without_query(layer: Any, name: str) -> None:
    """Make the joint projection, whose query rows are gone, give keys in their place."""
    owner = getattr(layer, name)
    owner.query_blocks = Joint.of(layer).blocks
    become(owner, KeyValueConv1D if isinstance(owner, Conv1D) else KeyValueLinear)


def with_query(owner: Any) -> None:
    """Undo :func:`without_query`, before the rows come back."""
    if isinstance(owner, (KeyValueConv1D, KeyValueLinear)):
        become(owner, Conv1D if isinstance(owner, KeyValueConv1D) else nn.Linear)
        del owner.query_blocks
