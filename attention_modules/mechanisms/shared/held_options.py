"""Options that a mechanism reads at each call: what it holds, and other values for a while."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attention_modules.function import FunctionAttention
from attention_modules.mechanism import AttentionMechanism, build_mechanism


def held_option(mechanism: AttentionMechanism, name: str) -> object:
    """What the mechanism has under an option's name at a call; None where it has nothing, or no value yet."""
    if not isinstance(mechanism, FunctionAttention):
        return getattr(mechanism, name, None)
    option = inspect.signature(type(mechanism)).parameters.get(name)
    return mechanism.options.get(name, None if option is None else option.default)


def hold_option(mechanism: AttentionMechanism, name: str, value: object) -> None:
    """Give the mechanism another value of an option that it holds; no value is refused."""
    if isinstance(mechanism, FunctionAttention):
        mechanism.options = {**mechanism.options, name: value}
    else:
        setattr(mechanism, name, value)


def try_options(mechanism: AttentionMechanism, options: Mapping[str, Any]) -> None:
    """Build such a mechanism with other options, without memory and random numbers.

    Raises:
        TypeError, ValueError: as the mechanism does.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        build_mechanism(type(mechanism), mechanism.spec, **{**(mechanism.built_with or {}), **options})


@contextmanager
def other_options(mechanisms: Sequence[AttentionMechanism], options: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the mechanisms that hold options of these names have other values of them.

    Args:
        mechanisms: of a model.
        options: by name; all mechanisms that hold one get its value.

    Raises:
        ValueError: no mechanism holds an option of a name, or one does not take its value.

    Example:
        >>> import torch
        >>> from attention_modules import AttentionSpec, RPCAttention
        >>> from attention_modules.mechanisms.shared.held_options import other_options
        >>> rpc = RPCAttention(AttentionSpec(dim=16, num_heads=2, head_dim=8), iterations=4)
        >>> with other_options([rpc], {"iterations": 1}):
        ...     rpc.iterations
        1
        >>> rpc.iterations
        4
    """
    held = {name: [each for each in mechanisms if _holds(each, name)] for name in options}
    for name, value in options.items():
        if not held[name]:
            kinds = ", ".join(sorted({type(each).__name__ for each in mechanisms})) or "none"
            raise ValueError(f"no mechanism of the model reads an option {name!r} at each call ({kinds})")
        for each in held[name]:
            try:
                try_options(each, {name: value})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{type(each).__name__} does not take {name}={value!r}: {error}") from error
    before = [(each, name, held_option(each, name)) for name, found in held.items() for each in found]
    try:
        for each, name, _ in before:
            hold_option(each, name, options[name])
        yield
    finally:
        for each, name, value in before:
            hold_option(each, name, value)


def _holds(mechanism: AttentionMechanism, name: str) -> bool:
    options = inspect.signature(type(mechanism)).parameters
    return name in options and (isinstance(mechanism, FunctionAttention) or hasattr(mechanism, name))
