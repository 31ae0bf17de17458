"""What timm's attention layers have in common: how they are recognized, read and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from attention_modules.hosts.base import Host, Swapped, has_hooks
from attention_modules.hosts.forwards import definer, has_other_forward, has_replaced_forward
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.projections import JOINT, Projections, Widths, features_of
from attention_modules.hosts.query import QueryPart
from attention_modules.hosts.weights import Rows
from attention_modules.mechanism import AttentionSpec


class SwappedTimm(Swapped):
    """The steps that timm's forwards share; each kind of attention puts its own between them."""

    host: ClassVar[TimmHost]  # type: ignore[misc]

    def _split(self: Any, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """q (None where it was dropped), k, v ``[B, H, N, d]``, and the tokens that they are made of."""
        split = self.host.projections(self).split
        return *split(self, x, self.host.widths(self), sequences=self._sequences), x

    def _sequences(self, x: Tensor) -> Tensor:
        """``[B, N, C]`` of tokens as the layer keeps them, which its projections act on."""
        return x

    def _arranged(self, out: Tensor, x: Tensor) -> Tensor:
        """``[B, N, C]`` as the layer keeps its tokens ``x``."""
        return out

    def _dropped(self: Any, weights: Tensor, x: Tensor) -> Tensor:
        """A map ``[B, H, N, M]`` after ``attn_drop``, which is given it in the plain layer's layout."""
        return self.attn_drop(weights)

    def _mix(
        self: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        **given: object,
    ) -> Tensor:
        """The mechanism, where the keys ask if there is no query; ``[B, N, H * d]``, arranged as the tokens ``x`` are.

        Where something of the user's reads the map in ``attn_drop``, to which the plain layer gives the one that mixes
        the values, so does a mechanism that has one.
        """
        shown = self.mechanism.gives_weights and any(_reads(self._modules[name]) for name in _dropouts(self))
        weights: list[Tensor] = []
        out = self.mix(
            k if q is None else q,
            k,
            v,
            self._sequences(x),
            attn_mask=mask,
            is_causal=causal,
            dropout_p=0.0 if shown else self._dropout(),
            scale=self.host.scale(self) if scale is None else scale,
            **given,
            **({"weights": weights} if shown else {}),
        )
        if shown:
            out = self._dropped(weights[0], x) @ v
        return self._arranged(out.transpose(1, 2).flatten(2), x)

    def _dropout(self: Any) -> float:
        """As the layer's own forward has it: its module drops out by its own mode, the fused kernel by the layer's."""
        if "attn_drop" not in self._modules:
            return 0.0
        drops = self.training if getattr(self, "fused_attn", False) else self.attn_drop.training
        return getattr(self.attn_drop, "p", 0.0) if drops else 0.0

    def _leave(self: Any, out: Tensor) -> Tensor:
        """The output projection."""
        out = self.proj(out)
        return self.proj_drop(out) if "proj_drop" in self._modules else out


class TimmHost(Host):
    """One attention class of timm's, and subclasses of it that change nothing in the forward.

    Recognized by the names of module and class, so that no file of timm's is imported for it.
    """

    tells_causality = True
    library: ClassVar[str]
    kind: ClassVar[str] = "Attention"
    parts: ClassVar[Projections] = JOINT

    def concerns(self, kind: type[nn.Module]) -> bool:
        return self._named(kind) is not None

    def understands(self, module: nn.Module) -> bool:
        kind = type(module)
        return self._named(kind) is not None and self.near_miss(module) is None

    def near_miss(self, module: nn.Module) -> str | None:
        kind = type(module)
        if self._named(kind) is None:
            return None
        if has_other_forward(module) or has_replaced_forward(kind) or not self._is(definer(kind)):
            return f"unsupported subclass: {kind.__name__} is a {self.name} with a forward of its own"
        return self.unsuitable(module)

    def _named(self, kind: type) -> type | None:
        return next((base for base in kind.__mro__ if self._is(base)), None)

    def _is(self, kind: type) -> bool:
        return kind.__name__ == self.kind and kind.__module__ == self.library

    def unsuitable(self, layer: Any) -> str | None:
        """Why a layer of this class is not one that a mechanism can be put into, if so."""
        return None

    def projections(self, layer: Any) -> Projections:
        """Where the layer holds its queries, keys and values."""
        return self.parts

    def widths(self, layer: Any) -> Widths:
        """Sizes of the layer's heads; here all of one width, which the output projection knows."""
        width = self.value_width(layer) // layer.num_heads
        return Widths(layer.num_heads, width, width, layer.num_heads)

    def value_width(self, layer: Any) -> int:
        """Features of all heads' values together."""
        return features_of(layer, "proj")

    def scale(self, layer: Any) -> float | None:
        """Factor on the logits; None for 1/sqrt(d), as timm's fused forwards have it, whatever ``scale`` is."""
        return None if getattr(layer, "fused_attn", False) else layer.scale

    def length(self, layer: Any) -> int | None:
        """The number of tokens where the layer itself fixes it, as windows do."""
        return None

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        widths = self.widths(layer)
        return AttentionSpec(
            self.projections(layer).input_width(layer),
            widths.heads,
            widths.head_dim,
            self.length(layer),
            layer_index=layer_index,
            value_dim=None if widths.value_dim == widths.head_dim else widths.value_dim,
        )

    def num_tokens(self, layer: Any, ancestors: Sequence[nn.Module]) -> int | None:
        """Learned absolute positions fix the length, class and register tokens included."""
        return next(filter(None, map(_positions, reversed(ancestors))), None)

    def fixes_length(self, ancestors: Sequence[nn.Module]) -> bool:
        return True

    def map_modules(self, layer: Any) -> list[str]:
        if getattr(layer, "fused_attn", False):
            return []
        return [name for each in ("attn_drop", "softmax", "rel_pos") for name in _named(each, layer)]

    def silenced(self, layer: Any, gives_weights: bool) -> list[str]:
        others = [name for name in super().silenced(layer, gives_weights) if name not in _dropouts(layer)]
        return others + [name for name in _dropouts(layer) if not gives_weights and _reads(layer._modules[name])]

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        return self.projections(layer).query_parts(layer, self.widths(layer))

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        return self.projections(layer).qk_rows(layer, self.widths(layer))

    def groups(self, layer: Any) -> int:
        widths = self.widths(layer)
        return widths.heads // widths.key_heads

    def qk_biases(self, layer: Any) -> tuple[Rows | None, Rows | None]:
        own = self.projections(layer).own_qk_biases(layer, self.widths(layer))
        return super().qk_biases(layer) if own is None else own

    def norm(self, layer: Any) -> str | None:
        return "q/k norm" if _query_norm(layer) else None

    def limits(self, layer: Any) -> Limits:
        found = super().limits(layer)
        query = found.without_query or self.projections(layer).query_refusal(layer)
        if _query_norm(layer):
            query = (
                "it normalizes queries (q_norm), whose weights would train nothing without a query; "
                "use a mechanism with a query, or build the model with qk_norm=False"
            )
        return replace(found, without_query=query)


def _positions(model: Any) -> int | None:
    """For how many tokens a vision transformer, or a masked autoencoder of others around timm's blocks, has positions.

    Other models of timm may add tokens, merge them, or resize their positions to each image.
    """
    table = model._parameters.get("pos_embed")
    known = hasattr(model, "no_embed_class") or "mask_token" in model._parameters
    if table is None or table.dim() != 3 or not known:
        return None
    return table.shape[1] + (model.num_prefix_tokens if getattr(model, "no_embed_class", False) else 0)


def _dropouts(layer: Any) -> list[str]:
    """The dropout to which the plain layer gives its map, where it makes one."""
    return [] if getattr(layer, "fused_attn", False) else _named("attn_drop", layer)


def _reads(dropout: Any) -> bool:
    """Whether what stands in the place of the dropout of maps reads or changes them, or a hook on it does."""
    return has_hooks(dropout) or type(dropout).forward not in (nn.Dropout.forward, nn.Identity.forward)


def _named(name: str, layer: nn.Module) -> list[str]:
    return [name] if isinstance(layer._modules.get(name), nn.Module) else []


def _query_norm(layer: nn.Module) -> bool:
    return not isinstance(layer._modules.get("q_norm", nn.Identity()), nn.Identity)
