"""What a mechanism is, what it is told about its layer, and how it is found by name."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

ENTRY_POINT_GROUP = "attnswap.mechanisms"


@dataclass(frozen=True)
class AttentionSpec:
    """What a mechanism may know about the layer that it serves.

    Args:
        dim: width of the layer's input, C.
        num_heads: number of query heads, H.
        head_dim: width of one head, d (H * d need not equal ``dim``).
        num_tokens: sequence length N where the layer fixes it, else None.
        is_causal: whether the layer hides the future.
        layer_index: position of the layer among the model's self-attention layers, else None.
        value_dim: width of one head's value where it is not ``head_dim``, else None.

    Raises:
        ValueError: if a size is not a positive integer.
    """

    dim: int
    num_heads: int
    head_dim: int
    num_tokens: int | None = None
    is_causal: bool = False
    layer_index: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for field in ("dim", "num_heads", "head_dim", "num_tokens", "value_dim"):
            value = getattr(self, field)
            if value is None and field in ("num_tokens", "value_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"AttentionSpec.{field} must be an integer of at least 1, got {value!r}")


class AttentionMechanism(nn.Module):
    """What happens between the projections of an attention layer.

    Subclasses implement :meth:`forward` with the signature of
    :func:`torch.nn.functional.scaled_dot_product_attention`. Where ``uses_query`` is False the
    host drops its query projection, and :meth:`forward` ignores ``q`` (it may be ``k`` itself).
    """

    uses_query: ClassVar[bool] = True
    one_query_per_key: ClassVar[bool] = False
    """Whether it uses queries, and needs as many of them as keys."""
    one_query_a_key: ClassVar[bool] = False
    """The same under its former name, in which a subclass may still set it."""
    gives_weights: ClassVar[bool] = False
    """Whether ``forward`` takes ``weights``, a list to which it adds the map ``[B, H, N, M]`` that mixed the values."""
    built_with: Mapping[str, object] | None = None
    """The options it was built with by name or class; None where a callable or hand built it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "one_query_a_key" in vars(cls) and "one_query_per_key" not in vars(cls):
            cls.one_query_per_key = cls.one_query_a_key
        cls.one_query_a_key = cls.one_query_per_key

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

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


MechanismFactory = Callable[[AttentionSpec], AttentionMechanism]
Mechanism = str | type[AttentionMechanism] | MechanismFactory
_T = TypeVar("_T", bound=type[AttentionMechanism])
_REGISTRY: dict[str, type[AttentionMechanism]] = {}
_entry_points_loaded = False


def register_mechanism(name: str) -> Callable[[_T], _T]:
    """Class decorator that makes a mechanism known by a short name.

    Raises:
        ValueError: if the name already stands for another class.
        TypeError: if what is decorated is not an :class:`AttentionMechanism`.
    """

    def register(cls: _T) -> _T:
        if not (isinstance(cls, type) and issubclass(cls, AttentionMechanism)):
            raise TypeError(f"mechanism {name!r} must be a subclass of AttentionMechanism, got {cls!r}")
        known = _REGISTRY.get(name, cls)
        # Compared by path, not identity: a module that is reloaded makes a new class of the same name.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"mechanism name {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another name"
            )
        _REGISTRY[name] = cls
        return cls

    return register


def _load_entry_points() -> None:
    """Register what other packages offer, once; a package that fails to load is a warning, not the end."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded = entry.load()
            if isinstance(loaded, type):  # a module may stand there instead, and register by decorator
                register_mechanism(entry.name)(loaded)
        except Exception as error:  # another package's fault must not take down ours
            warnings.warn(f"mechanism {entry.name!r} ({entry.value}) could not be loaded: {error}", stacklevel=2)


def available_mechanisms() -> list[str]:
    """Short names of all known mechanisms, those of other installed packages included, sorted."""
    _load_entry_points()
    return sorted(_REGISTRY)


def mechanism_class(mechanism: str | type[AttentionMechanism]) -> type[AttentionMechanism]:
    """The class that a short name (or the class itself) stands for.

    Raises:
        ValueError: if the name is unknown; the text lists the known and the nearest names.
        TypeError: if it is neither a name nor a mechanism class.
    """
    if isinstance(mechanism, str):
        if mechanism not in _REGISTRY:
            _load_entry_points()
        if mechanism in _REGISTRY:
            return _REGISTRY[mechanism]
        raise ValueError(
            f"unknown attention mechanism {mechanism!r}.{did_you_mean(mechanism, _REGISTRY)} "
            f"Known: {', '.join(sorted(_REGISTRY))}"
        )
    if isinstance(mechanism, type) and issubclass(mechanism, AttentionMechanism):
        return mechanism
    raise TypeError(f"expected a mechanism name or a subclass of AttentionMechanism, got {mechanism!r}")


def short_name(cls: type[AttentionMechanism]) -> str:
    """The name by which a mechanism is registered, else its import path."""
    names = [name for name, known in _REGISTRY.items() if known is cls]
    return names[0] if names else f"{cls.__module__}.{cls.__qualname__}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that offers the nearest known names, with a space before it; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def check_options(cls: type[AttentionMechanism], options: object) -> None:
    """Check that options are a mapping of names that the mechanism takes.

    Raises:
        TypeError: if they are not; the text names the unknown, the nearest and the known options.
    """
    if not isinstance(options, Mapping):
        raise TypeError(
            f"the options of {cls.__name__} must be a dict of names and values, got {options!r}; "
            "write them as {'name': value}"
        )
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # without the spec
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for name in options:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TypeError(f"{cls.__name__} has no option {name!r}; {takes}.{did_you_mean(str(name), known)}")


def build_mechanism(mechanism: Mechanism, spec: AttentionSpec, **options: object) -> AttentionMechanism:
    """A mechanism for one layer, from a short name, a class, or a callable that takes the spec.

    Raises:
        TypeError: if options do not fit the mechanism, come with a callable (which carries its own),
            or the callable returns something else.
        ValueError: from the mechanism, where an option's value is out of its limits.
    """
    if isinstance(mechanism, (str, type)):
        cls = mechanism_class(mechanism)
        check_options(cls, options)
        try:
            built = cls(spec, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__} could not be built with the options {options}: {error}") from error
        built.built_with = dict(options)
        return built
    if isinstance(mechanism, AttentionMechanism):
        name = type(mechanism).__name__
        raise TypeError(
            f"expected a mechanism name, class or callable, got a built {name}, which would be one for all layers; "
            f"give the class {name} itself, and its arguments as options by name"
        )
    if not callable(mechanism):
        raise TypeError(f"expected a mechanism name, class or callable, got {mechanism!r}")
    if options:
        raise TypeError(f"options {sorted(options)} go with a name or class; a callable carries its own")
    built = mechanism(spec)
    if not isinstance(built, AttentionMechanism):
        raise TypeError(f"{mechanism!r} must return an AttentionMechanism, got {type(built).__name__}")
    return built
