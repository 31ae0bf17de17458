"""Our own ``SelfAttention``, which has a mechanism before any swap."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attention_modules.base import OPAQUE
from attention_modules.hosts.base import Host, Swapped, plain_linear_refusal
from attention_modules.hosts.forwards import is_own_forward
from attention_modules.hosts.limits import Limits
from attention_modules.hosts.query import QueryPart, query_parts
from attention_modules.hosts.weights import Rows
from attention_modules.layers import SelfAttention
from attention_modules.mechanism import AttentionMechanism, AttentionSpec


class SwappedSelf(Swapped):
    """``SelfAttention`` with another mechanism; its own is kept outside ``modules()`` until restored."""

    kept_mechanism: tuple[AttentionMechanism]  # a tuple, so that nn.Module does not register it

    def accept_plain_mechanism(self, state: dict[str, Tensor], prefix: str) -> None:
        """A checkpoint from before the swap holds the layer's own mechanism, which is then the one to fill."""
        (own,) = self.kept_mechanism
        given = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
        if given == set(own.state_dict()) and given != set(self.mechanism.state_dict()):
            own.load_state_dict({key: state.pop(prefix + key) for key in given})
            self.fill_state(state, prefix)


class SelfAttentionHost(Host):
    """``attention_modules.SelfAttention``."""

    name = "attnswap SelfAttention"
    mixin = SwappedSelf
    tells_causality = True

    def concerns(self, kind: type[nn.Module]) -> bool:
        return issubclass(kind, SelfAttention)

    def understands(self, module: nn.Module) -> bool:
        return isinstance(module, SelfAttention) and is_own_forward(module, SelfAttention.forward)

    def near_miss(self, module: nn.Module) -> str | None:
        if isinstance(module, SelfAttention) and not self.understands(module):
            return f"unsupported subclass: {type(module).__name__} is a SelfAttention with a forward of its own"
        return None

    def spec(self, layer: Any, layer_index: int | None) -> AttentionSpec:
        own = layer.mechanism.spec
        return AttentionSpec(
            own.dim, layer.num_heads, layer.head_dim, own.num_tokens, own.is_causal, layer_index=layer_index
        )

    def query_parts(self, layer: Any) -> tuple[QueryPart, ...]:
        if not layer.mechanism.uses_query:
            return ()  # built without a query: nothing to take
        return query_parts(layer, "qkv", layer.num_heads * layer.head_dim, {"weight": 0, "bias": 0})

    def qk_rows(self, layer: Any) -> tuple[Rows, Rows]:
        width = layer.num_heads * layer.head_dim
        start = width if layer.mechanism.uses_query else 0
        return Rows(layer.qkv, 0, width), Rows(layer.qkv, start, start + width)

    def norm(self, layer: Any) -> str | None:
        return None if isinstance(layer.k_norm, nn.Identity) else "q/k norm"

    def limits(self, layer: Any) -> Limits:
        own = layer.kept_mechanism[0] if isinstance(layer, SwappedSelf) else layer.mechanism
        if not own.uses_query:
            return Limits(
                with_query=f"it was built with {type(own).__name__} and has no query projection; choose a mechanism "
                "without a query, or build the layer with one that has a query"
            )
        if not isinstance(layer.q_norm, nn.Identity):
            return Limits(
                without_query="it normalizes queries (q_norm), whose weights would train nothing without a query; "
                "use a mechanism with a query, or build the layer with qk_norm=False"
            )
        return Limits(without_query=plain_linear_refusal(layer, {"qkv": nn.Linear}))

    def insert(self, layer: Any, mechanism: AttentionMechanism) -> None:
        if not isinstance(layer, SwappedSelf):
            layer.__dict__["kept_mechanism"] = (layer.mechanism,)
        super().insert(layer, mechanism)

    def _take_mechanism(self, layer: Any) -> None:
        (own,) = layer.__dict__.pop("kept_mechanism")
        weight = layer.proj.weight
        layer.mechanism = own.to(weight.device, weight.dtype).train(layer.training)  # keeps its place among the modules
        layer.__dict__["__module__"] = OPAQUE


HOSTS: tuple[Host, ...] = (SelfAttentionHost(),)
