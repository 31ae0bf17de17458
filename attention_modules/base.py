"""What a mechanism is, and what it is told about its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

NEEDS = ("x", "first_value", "previous_value")
OPAQUE = "torch.nn"  # as a layer's own `__module__`: torch.fx traces into no module of torch.nn
Cache = Literal["keys and values", "whole sequence", "state"]
Causality = Literal["any", "never", "always"]
State = dict[str, Tensor]  # what stands for all earlier tokens: tensors [B, ...], of sizes that do not grow with them


@dataclass(frozen=True)
class AttentionSpec:
    """What a mechanism may know about the layer that it serves.

    Args:
        dim: width of the layer's input, C.
        num_heads: number of query heads, H.
        head_dim: width of one head, d (H * d need not equal ``dim``).
        num_tokens: sequence length N where the layer fixes it, else None.
        is_causal: whether the layer hides the future.
        layer_index: position of the layer among the self-attention layers of its network, else None.
        value_dim: width of one head's value where it is not ``head_dim``, else None.
        layer_name: name of the layer in the model, for messages; else None.
        mixes_heads: whether the layer mixes the maps of its heads by projections of its own, as CaiT's do, which it
            hands to the mechanism.

    Raises:
        ValueError: if a size is not a positive integer.

    Example:
        >>> from attnswap import AttentionSpec
        >>> AttentionSpec(dim=192, num_heads=3, head_dim=64).is_causal
        False
    """

    dim: int
    num_heads: int
    head_dim: int
    num_tokens: int | None = None
    is_causal: bool = False
    layer_index: int | None = None
    value_dim: int | None = None
    layer_name: str | None = field(default=None, compare=False)
    mixes_heads: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "num_heads", "head_dim", "num_tokens", "value_dim"):
            value = getattr(self, name)
            if value is None and name in ("num_tokens", "value_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"AttentionSpec.{name} must be an integer of at least 1, got {value!r}")

    told: ClassVar[bool] = True
    """Whether ``dim``, ``num_heads`` and ``head_dim`` are known; where not, to read one is an error with the cure."""

    def placed(self, **changes: Any) -> AttentionSpec:
        """The same with other values of some fields."""
        return replace(self, **changes)


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Draw random numbers on the CPU that nothing else draws, and leave their global state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(1 << 62, (), device="cpu")))
        yield


class AttentionMechanism(nn.Module):
    """What happens between the projections of an attention layer.

    Subclasses implement :meth:`forward` with the signature of
    :func:`torch.nn.functional.scaled_dot_product_attention`. Where ``uses_query`` is False the
    host drops its query projection, and :meth:`forward` ignores ``q`` (it may be ``k`` itself).

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> from attnswap import AttentionMechanism, register_mechanism, swap_attention
        >>> @register_mechanism("halved")
        ... class Halved(AttentionMechanism):
        ...     def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
        ...         return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale) / 2
        >>> layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        >>> swap_attention(layer, "halved")[0].mechanism
        'Halved'
    """

    uses_query: bool = True
    one_query_per_key: ClassVar[bool] = False
    """Whether it uses queries, and needs as many of them as keys."""
    gives_weights: ClassVar[bool] = False
    """Whether ``forward`` takes ``weights``, a list to which it adds the map ``[B, H, N, M]``, and mixes the values
    with the list's last: so the map that the layer returns has a gradient."""
    needs: tuple[str, ...] = ()
    """What ``forward`` takes as further keywords: ``"x"``, the layer's input ``[B, N, C]`` (that of the queries);
    ``"first_value"`` and ``"previous_value"``, the values ``[B, H, M, d]`` of the first layer of the same stack and of
    the one before, None in the first layer."""
    neutral: ClassVar[Mapping[str, object] | None] = None
    """Options with which a new layer gives what softmax attention gives; None where none do."""
    row_masks: ClassVar[bool] = True
    """Whether rows may see different keys; where False, it takes padding masks alone, and what ``causality`` says."""
    softmax_like: ClassVar[bool] = False
    """Whether all keys share the weights of a row by q kᵀ · scale plus the mask and nothing else, so that a bound on
    the logits may be given to it as a mask, and a sink as a further key whose value is zero."""
    stands_in: bool = False
    """Whether its layer is only watched, so that it gives what the plain layer computes."""
    surrogate_gradient: bool = False
    """Whether, by its definition, its gradient is not that of its output (straight-through, detached statistics)."""
    own_logits: ClassVar[str | None] = None
    """Why its logits are not q kᵀ · scale (k kᵀ where it uses no query) of what it is given, plus what a mask or a bias
    adds, if so: LogitMonitor says so, and callbacks that act on those logits refuse the layer."""
    stochastic: ClassVar[bool] = False
    """Whether, by its definition, it draws at random in training, and so gives there another output than elsewhere."""
    before_rotation: bool = False
    """Whether it treats features of a head apart, so that rotary positions must not have mixed them before."""
    counts_columns: bool = False
    """Whether it learns something of each position by its column, so that a layer which knows of other positions
    (packed sequences, padding before a sequence) is refused."""
    counts_distances: ClassVar[bool] = False
    """Whether it learns something of the distance of two tokens by that of their columns."""
    cache: ClassVar[Cache]
    """What it must be given of earlier tokens while generating; by default, keys and values where it takes more of them
    than queries, else the whole sequence. With ``"state"``, ``forward`` takes ``state``, a dict of tensors that is
    empty before the first token, and which it fills with what stands for all tokens so far."""
    causality: Causality = "any"
    """Whether a call may, may not or must hide the future; where ``row_masks`` is False, it may not by default."""
    remembers: ClassVar[bool] = False
    """Whether it must be given what :meth:`remember` gives of every earlier token: ``forward`` then takes ``kept``."""
    per_head: tuple[str, ...] | None = None
    """Its Parameters by name that hold one head's rows after the other's, so that some heads can be computed without
    the rest (tensor parallelism); None where they cannot (it mixes them), or nobody said so."""
    built_with: Mapping[str, object] | None = None
    """The options it was built with by name or class; None where a callable or hand built it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = set(cls.needs) - set(NEEDS)
        if isinstance(cls.needs, str) or unknown:
            raise TypeError(f"{cls.__name__}.needs must be a tuple of {', '.join(NEEDS)}, got {cls.needs!r}")
        if "per_head" not in vars(cls):
            cls.per_head = None  # what derives from another may mix what that one keeps apart
        if "cache" not in vars(cls) and getattr(cls, "cache", None) != "state":
            cls.cache = "keys and values" if cls.uses_query and not cls.one_query_per_key else "whole sequence"
        if not vars(cls).get("row_masks", True) and "causality" not in vars(cls):
            cls.causality = "never"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def reset_parameters(self) -> None:
        """Give Parameters and buffers the values of a new mechanism, as after ``to_empty``.

        Raises:
            RuntimeError: if a callable built it, whose arguments are not known.
        """
        if self.built_with is None:
            raise RuntimeError(f"{type(self).__name__} was built by a callable: load its values, or build it anew")
        self.load_state_dict(type(self)(self.spec, **self.built_with).state_dict())

    def init_weights(self) -> None:
        """Start the linear maps inside anew: timm's models call it after they gave own weights to all parts."""
        with drawing_apart():
            for part in self.modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()

    def own_map(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        """The map by which it mixes these values, where that is to be said; by default it is found from a call.

        What calls one kernel, or is linear in the values, need not say it. A mechanism that changes its output
        afterwards (a norm) does: monitors and :func:`attnswap.attention_maps` show what it returns.

        Args:
            q, k, v: as :meth:`forward` takes them.
            **given: its other arguments, but for dropout.

        Returns:
            ``[B, H, N, M]``, or None.

        Example:
            >>> import torch
            >>> from torch.nn import functional as F
            >>> from attnswap import AttentionMechanism, attention_maps, swap_attention
            >>> class Normed(AttentionMechanism):
            ...     def forward(self, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None):
            ...         return F.normalize(F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p), dim=-1)
            ...     def own_map(self, q, k, v, **given):
            ...         return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            >>> model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True)
            >>> report = swap_attention(model, Normed)
            >>> attention_maps(model, torch.randn(1, 5, 16))["self_attn"].shape
            torch.Size([1, 2, 5, 5])
        """
        return None

    def remember(self, x: Tensor) -> Tensor:
        """What must be kept of tokens whose keys are cached; the layer keeps it beside them where ``remembers``.

        Args:
            x: the layer's input ``[B, N, C]``.

        Returns:
            ``[B, H, N]``; ``forward`` is given that of all keys, ``[B, H, M]``, as ``kept``.
        """
        raise NotImplementedError(f"{type(self).__name__} remembers nothing")

    def needed(self, name: str, value: Tensor | None) -> Tensor:
        """One of ``needs`` that was given.

        Raises:
            ValueError: if it was not, as where the mechanism is called by hand.
        """
        if value is None:
            raise ValueError(f"{type(self).__name__} needs {name}, which the layer gives it: pass {name}=")
        return value

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Mix the values of each head.

        Args:
            q: queries ``[B, H, N, d]``.
            k: keys ``[B, H, M, d]``.
            v: values ``[B, H, M, d]`` (``spec.value_dim`` wide where that is set).
            attn_mask: boolean (True = may be seen) or additive, broadcastable to ``[B, H, N, M]``.
            is_causal: row i sees keys 0 to i only.
            dropout_p: attention dropout; callers pass 0 outside training.
            scale: factor on the logits, 1/sqrt(d) where None.

        Returns:
            ``[B, H, N, d]``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward(q, k, v, ...)")


class TensorMechanism(AttentionMechanism):
    """A mechanism that is a pure function and its tensors: a subclass names the one, and gives the others."""

    function: ClassVar[Callable[..., Tensor]]
    """Of q, k, v, what `tensors` gives, and the further arguments of `forward`; a static method."""

    def tensors(self, k: Tensor) -> tuple[Any, ...]:
        """What the function takes after q, k and v: Parameters and options; a subclass takes what it ``needs``."""
        return ()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        **given: Any,
    ) -> Tensor:
        """Call the function."""
        rest: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
        return self.function(q, k, v, *self.tensors(k, **given), **rest)


def queries_of(mechanism: AttentionMechanism, q: Tensor, k: Tensor) -> Tensor:
    """The queries of a call: where it uses none, its keys. Where a cache has more of them, ``q`` holds the new ones."""
    return q if mechanism.uses_query or q.shape[-2] < k.shape[-2] else k


def options_text(mechanism: AttentionMechanism) -> str:
    """The options that a mechanism was built with, as "iterations=4"; all that it shows where a callable built it."""
    given = mechanism.built_with
    return mechanism.extra_repr() if given is None else ", ".join(f"{name}={given[name]!r}" for name in given)


def described(mechanism: AttentionMechanism) -> str:
    """A mechanism with its options, as "RPCAttention, iterations=4"."""
    return ", ".join(filter(None, (type(mechanism).__name__, options_text(mechanism))))
