"""Numbers among the arguments of callbacks, checked."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def check_integer(name: str, value: object, limit: int) -> int:
    """The same number.

    Raises:
        ValueError: if it is no integer of at least ``limit``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < limit:
        raise ValueError(f"{name} must be an integer of at least {limit}, got {value!r}")
    return int(value)


def check_layers(layers: Any) -> Any:
    """The same choice of layers by position; which positions there are shows when the model is built.

    Raises:
        ValueError: if it is neither None nor an integer or a list of integers.
    """
    for index in layers if isinstance(layers, (list, tuple, range)) else [] if layers is None else [layers]:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ValueError(f"layers must be a list of integers, or None for all, got {layers!r}")
    return layers


def check_number(name: str, value: object, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    """The same number.

    Raises:
        ValueError: if it is no finite number from ``minimum`` to ``maximum``.
    """
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not (minimum <= number <= maximum and math.isfinite(number)):
        limits = "" if minimum == -math.inf else f" of at least {minimum:g}"
        limits += "" if maximum == math.inf else f" and at most {maximum:g}"
        raise ValueError(f"{name} must be a finite number{limits}, got {value!r}")
    return number
