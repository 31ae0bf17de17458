"""How a mechanism is found, by name, class, function or import path, and built for a layer."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from importlib.metadata import entry_points
from typing import Any, TypeGuard, TypeVar

from torch import nn
from torch.nn import functional as F

from attention_modules.base import AttentionMechanism, AttentionSpec
from attention_modules.function import OF_THE_SWAP, AttentionFunction, function_class, is_attention_function

ENTRY_POINT_GROUP = "attnswap.mechanisms"
MechanismFactory = Callable[[AttentionSpec], AttentionMechanism]
Mechanism = str | type[AttentionMechanism] | AttentionFunction | MechanismFactory
_T = TypeVar("_T", bound=type[AttentionMechanism] | AttentionFunction)
_REGISTRY: dict[str, type[AttentionMechanism]] = {}
_entry_points_loaded = False


def register_mechanism(name: str) -> Callable[[_T], _T]:
    """Decorator that makes a mechanism known by a short name: a class, or a function as :func:`swap_attention` takes.

    Raises:
        ValueError: if the name already stands for another class or function.
        TypeError: if what is decorated is neither.

    Example:
        >>> from attnswap import available_mechanisms, register_mechanism
        >>> @register_mechanism("mean_of_values")
        ... def mean_of_values(q, k, v):
        ...     return v.mean(-2, keepdim=True).expand_as(q)
        >>> "mean_of_values" in available_mechanisms()
        True
    """

    def register(mechanism: _T) -> _T:
        if is_attention_function(mechanism):
            cls: type[AttentionMechanism] = function_class(mechanism)
        elif isinstance(mechanism, type) and issubclass(mechanism, AttentionMechanism):
            cls = mechanism
        else:
            raise TypeError(
                f"mechanism {name!r} must be a subclass of AttentionMechanism, or a function of (q, k, v, ...), got "
                f"{mechanism!r}"
            )
        known = _REGISTRY.get(name, cls)
        # Compared by path, not identity: a module that is reloaded makes a new class of the same name.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"mechanism name {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another name"
            )
        _REGISTRY[name] = cls
        return mechanism

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
            if callable(loaded):  # a module may stand there instead, and register by decorator
                register_mechanism(entry.name)(loaded)
        except Exception as error:  # another package's fault must not take down ours
            warnings.warn(f"mechanism {entry.name!r} ({entry.value}) could not be loaded: {error}", stacklevel=2)


def available_mechanisms() -> list[str]:
    """Short names of all known mechanisms, those of other installed packages included, sorted.

    Example:
        >>> from attnswap import available_mechanisms
        >>> {"softmax", "rpc"} <= set(available_mechanisms())
        True
    """
    _load_entry_points()
    return sorted(_REGISTRY)


def mechanism_class(mechanism: Mechanism) -> type[AttentionMechanism]:
    """The class that a short name, an import path, a function or the class itself stands for.

    Raises:
        ValueError: if the name is unknown (the text lists the known and the nearest names), or the path names nothing.
        TypeError: if it is neither of these.
    """
    if isinstance(mechanism, str):
        if mechanism not in _REGISTRY:
            _load_entry_points()
        if mechanism in _REGISTRY:
            return _REGISTRY[mechanism]
        if "." in mechanism:
            return mechanism_class(_imported(mechanism))
        named = [name for name, cls in _REGISTRY.items() if cls.__name__ == mechanism]  # as reports print it
        near = f" Did you mean {named[0]!r}?" if named else did_you_mean(mechanism, _REGISTRY)
        raise ValueError(
            f"unknown attention mechanism {mechanism!r}.{near} "
            f"Known: {', '.join(sorted(_REGISTRY))}; your own is given as a function, a class or an import path"
        )
    if mechanism is AttentionMechanism:
        raise TypeError("AttentionMechanism itself computes nothing: give a class that is derived from it")
    if isinstance(mechanism, type) and issubclass(mechanism, AttentionMechanism):
        return mechanism
    if mechanism is F.scaled_dot_product_attention:  # a builtin without a signature
        return mechanism_class("softmax")
    if is_attention_function(mechanism):
        return function_class(mechanism)
    raise TypeError(
        f"expected a mechanism name, an import path, a subclass of AttentionMechanism or a function of (q, k, v, ...), "
        f"got {_shown(mechanism)}"
    )


def _imported(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"unknown attention mechanism {path!r}, and nothing to import: {error}") from error


def _shown(target: Any) -> str:
    """A function with its parameters, anything else as it prints."""
    try:
        return f"{target.__qualname__}{inspect.signature(target)}"
    except (AttributeError, TypeError, ValueError):
        return repr(target)


def is_registered(function: object) -> bool:
    """Whether a function stands under a short name."""
    return is_attention_function(function) and function_class(function) in _REGISTRY.values()


def short_name(cls: type[AttentionMechanism]) -> str:
    """The name by which a mechanism is registered, else its import path."""
    names = [name for name, known in _REGISTRY.items() if known is cls]
    return names[0] if names else f"{cls.__module__}.{cls.__qualname__}"


def nearest(
    name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6, *, beginnings: bool = False
) -> list[str]:
    """The known names that are like a name, the most like first; with `beginnings` also those that begin like it."""

    def likeness(each: str) -> tuple[float, float]:
        whole, start = (SequenceMatcher(None, text.lower(), name.lower()).ratio() for text in (each, each[: len(name)]))
        return (max(whole, start), whole) if beginnings else (whole, whole)

    ranked = sorted(((likeness(each), each) for each in known), key=lambda pair: pair[0], reverse=True)
    return [each for (score, _), each in ranked if score >= cutoff][:count]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that offers the nearest known names, with a space before it; empty where none is near."""
    near = nearest(name, known, cutoff=cutoff)
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
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    for name in options:
        # What is passed on to others may have any name; one that is nearly that of an option is a slip.
        near = did_you_mean(str(name), known, 0.8) if passes_on else did_you_mean(str(name), [*known, *OF_THE_SWAP])
        if name not in known and (near or not passes_on):
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TypeError(f"{cls.__name__} has no option {name!r}; {takes}.{near}")


def build_mechanism(mechanism: Mechanism, spec: AttentionSpec, **options: object) -> AttentionMechanism:
    """A mechanism for one layer.

    Args:
        mechanism: short name, import path, class, function of (q, k, v, ...), or callable that takes the spec alone.
        spec: the layer.
        **options: of the mechanism; a callable that takes the spec carries its own.

    Raises:
        TypeError: if options do not fit the mechanism, come with a callable, or the callable returns something else.
        ValueError: if a name is unknown, and from the mechanism, where an option's value is out of its limits.
    """
    given: Any = mechanism
    if isinstance(given, functools.partial) and not given.args and is_attention_function(given.func):
        mechanism, options = given.func, {**given.keywords, **options}
    if isinstance(mechanism, nn.Module):
        name = type(mechanism).__name__
        derived = "" if isinstance(mechanism, AttentionMechanism) else ", derived from AttentionMechanism,"
        raise TypeError(
            f"expected a mechanism name, class or function, got a built {name}, which would be one for all layers; "
            f"give the class {name} itself{derived} and its arguments as options by name"
        )
    if _takes_spec_alone(mechanism):
        if options:
            raise TypeError(f"options {sorted(options)} go with a name, class or function; a callable carries its own")
        made = mechanism(spec)
        if not isinstance(made, AttentionMechanism):
            raise TypeError(f"{mechanism!r} must return an AttentionMechanism, got {type(made).__name__}")
        return made
    cls = mechanism_class(mechanism)
    check_options(cls, options)
    try:
        built = cls(spec, **options)
    except TypeError as error:
        raise TypeError(f"{cls.__name__} could not be built with the options {options}: {error}") from error
    built.built_with = dict(options)
    return built


def _takes_spec_alone(mechanism: Any) -> TypeGuard[MechanismFactory]:
    """Whether it is a callable from :class:`AttentionSpec` to a mechanism."""
    if isinstance(mechanism, (str, type)) or not callable(mechanism):
        return False
    try:
        inspect.signature(mechanism).bind(None)
    except (TypeError, ValueError):  # takes more, or is a builtin
        return False
    return True
