"""Where a layer holds its queries, keys and values, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_modules.hosts.base import AttentionSwapError, plain_linear_refusal
from attention_modules.hosts.query import QueryPart, query_parts
from attention_modules.hosts.weights import Rows


@dataclass(frozen=True)
class Widths:
    """Sizes of a layer's heads.

    Args:
        heads: number of query heads, H.
        head_dim: width of a query and a key.
        value_dim: width of a value.
        key_heads: number of key and value heads.
    """

    heads: int
    head_dim: int
    value_dim: int
    key_heads: int

    def of(self, letter: str) -> int:
        """Width of one head of q, k or v."""
        return self.value_dim if letter == "v" else self.head_dim

    def features(self, letter: str) -> int:
        """Features of q, k or v in all."""
        return self.of(letter) * (self.heads if letter == "q" else self.key_heads)


def commonest(widths: Sequence[int]) -> int:
    """That of a linear layer among those of adapters beside and behind it."""
    return max(widths, key=lambda width: (widths.count(width), width))


def features_of(layer: nn.Module, path: str) -> int:
    """How many features a projection takes.

    Raises:
        AttentionSwapError: if it is no linear layer, and holds none.
    """
    projection = layer.get_submodule(path)
    widths = [getattr(part, "in_channels", getattr(part, "in_features", None)) for part in projection.modules()]
    if isinstance(widths[0], int):
        return widths[0]
    if inner := [width for width in widths if isinstance(width, int)]:
        return commonest(inner)  # one that is wrapped by hand stands inside
    raise AttentionSwapError(f"its projection {path!r} is a {type(projection).__name__}, and no linear layer")


@dataclass(frozen=True)
class Projections:
    """The layer's projections, each with the letters of what it holds in order.

    Args:
        parts: path of a projection (linear, or a 1 x 1 convolution) and its letters.
        by_head: whether each head has its query, key and value together, ``(H, 3, d)`` instead of ``(3, H, d)``.
        own_biases: whether ``q_bias``, ``k_bias`` and ``v_bias`` of the layer stand for the projection's bias.
        inner: path below a projection of the linear layer that holds its weight ("" = the projection itself).
    """

    parts: tuple[tuple[str, str], ...] = (("qkv", "qkv"),)
    by_head: bool = False
    own_biases: bool = False
    inner: str = ""

    def split(
        self,
        layer: Any,
        x: Tensor,
        widths: Widths,
        asking: Tensor | None = None,
        sequences: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """q (None where it was dropped), k, v ``[B, H, N, d]`` of ``[B, N, C]``, or of ``[B, C, h, w]``.

        A query whose projection is its own is made of ``asking``, where other tokens than those of the keys ask.
        Other layouts of the tokens are projected as they are, and ``sequences`` makes ``[B, N, features]`` of that.
        """
        found: dict[str, Tensor] = {}
        for path, letters in self.parts:
            if self._present(layer, letters):
                source = x if asking is None or letters != "q" else asking
                found.update(self.made(layer, path, letters, source, widths, sequences))
        return found.get("q"), found["k"], found["v"]

    def made(
        self,
        layer: Any,
        path: str,
        letters: str,
        x: Tensor,
        widths: Widths,
        sequences: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> dict[str, Tensor]:
        """Those of q, k and v ``[B, H, N, d]`` that one of the projections makes of ``[B, N, C]``."""
        letters, projected = self._present(layer, letters), sequences(self._project(layer, path, x))
        return dict(zip(letters, self._heads(projected, letters, widths), strict=True))

    def _heads(self, y: Tensor, letters: str, widths: Widths) -> list[Tensor]:
        """Of ``[B, N, features]`` or ``[B, features, h, w]``, split before it is turned: gradients keep the layout."""
        image = y.dim() == 4
        y, axis = (y.flatten(2), 1) if image else (y, 2)
        if self.by_head:
            parts = list(y.unflatten(axis, (widths.heads, -1)).split([*map(widths.of, letters)], axis + 1))
        else:
            split = zip(y.split([*map(widths.features, letters)], axis), letters, strict=True)
            parts = [part.unflatten(axis, (-1, widths.of(letter))) for part, letter in split]
        return [part.transpose(2, 3) if image else part.transpose(1, 2) for part in parts]

    def _project(self, layer: Any, path: str, x: Tensor) -> Tensor:
        """Of ``[..., C]`` or ``[B, C, h, w]``, features in place of C."""
        projection = layer.get_submodule(path)
        if self.own_biases and layer.v_bias is not None:
            bias = torch.cat([getattr(layer, f"{letter}_bias") for letter in self._present(layer, "qkv")])
            if layer.qkv_bias_separate:
                return projection(x) + bias
            return F.linear(x, projection.weight, bias)
        return projection(x)

    @staticmethod
    def _present(layer: Any, letters: str) -> str:
        return letters.removeprefix("q") if getattr(layer, "dropped_query", ()) else letters

    def query_parts(self, layer: Any, widths: Widths) -> tuple[QueryPart, ...]:
        """Where the plain layer holds its query rows."""
        path = self._holder("q")
        size, blocks = widths.features("q"), widths.heads if self.by_head else 1
        parts = query_parts(layer, path, size, {"weight": 0, "bias": 0}, blocks)
        return parts + (query_parts(layer, "", size, {"q_bias": 0}) if self.own_biases else ())

    def qk_rows(self, layer: Any, widths: Widths) -> tuple[Rows, Rows]:
        """The query's and the key's rows, as the layer is now."""
        query, key = (self.rows(layer, letter, widths) for letter in "qk")
        return query, key

    def rows(self, layer: Any, letter: str, widths: Widths) -> Rows:
        """The rows of q, k or v, as the layer is now."""
        letters = self._present(layer, self._owner(letter)[1])
        width = widths.of if self.by_head else widths.features
        start = sum(width(other) for other in letters[: max(letters.find(letter), 0)])
        blocks = widths.heads if self.by_head else 1
        return Rows(layer.get_submodule(self._holder(letter)), start, start + width(letter), blocks=blocks)

    def own_qk_biases(self, layer: Any, widths: Widths) -> tuple[Rows | None, Rows] | None:
        """Where the layer itself holds the biases of queries and keys; None where the projection does."""
        if not self.own_biases or layer.v_bias is None:
            return None
        query, key = (Rows(layer, 0, widths.features(letter), f"{letter}_bias") for letter in "qk")
        return (query if self._present(layer, "q") else None), key

    def input_width(self, layer: Any, letter: str = "k") -> int:
        """C, of what keys are made of, or queries or values."""
        return features_of(layer, self._holder(letter))

    def query_refusal(self, layer: nn.Module) -> str | None:
        """Why the query rows cannot be split off, if so."""
        path = self._holder("q")
        convolution = hasattr(layer.get_submodule(path), "in_channels")
        return plain_linear_refusal(layer, {path: nn.Conv2d if convolution else nn.Linear})

    def _owner(self, letter: str) -> tuple[str, str]:
        return next(part for part in self.parts if letter in part[1])

    def _holder(self, letter: str) -> str:
        """Path of the module that holds the letter's weight."""
        return self._owner(letter)[0] + (f".{self.inner}" if self.inner else "")


JOINT = Projections()
JOINT_BY_HEAD = Projections(by_head=True)
JOINT_OWN_BIASES = Projections(own_biases=True)
SEPARATE = Projections((("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")))
