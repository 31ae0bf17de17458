"""Choices of layers, checked."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def is_sequence(value: object) -> bool:
    """Whether it is a list of any make, such as OmegaConf's, and no string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def check_layers(layers: Any) -> Any:
    """The same choice of layers by position; which positions there are shows when the model is built.

    Raises:
        ValueError: if it is neither None nor an integer or a list of integers.
    """
    several = is_sequence(layers)
    for index in layers if several else [] if layers is None else [layers]:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ValueError(f"layers must be a list of integers, or None for all, got {layers!r}")
    return list(layers) if several else layers


def check_layer_choice(where: Any, layers: Any, exclude: Any) -> tuple[Any, Any, Any]:
    """A choice of layers by name and position, its lists as lists; names are looked for when the model is built.

    Raises:
        ValueError: as :func:`check_layers`, and if ``exclude`` is neither names nor None.
    """
    if not (exclude is None or callable(exclude) or isinstance(exclude, str) or is_sequence(exclude)):
        raise ValueError(f"exclude must be names of layers (globs), or None for none, got {exclude!r}")
    excluded = [exclude] if isinstance(exclude, str) else list(exclude) if is_sequence(exclude) else exclude
    return list(where) if is_sequence(where) else where, check_layers(layers), excluded or []
