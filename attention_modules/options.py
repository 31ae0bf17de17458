"""Checks of the options of mechanisms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real


def check_choice(name: str, value: str, known: Sequence[str]) -> str:
    """An option that is one of a few words.

    Raises:
        ValueError: if it is none of them.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_number(name: str, value: object, *, at_least: float | None = None, above: float | None = None) -> float:
    """An option that is a finite number.

    Args:
        name: of the option.
        value: what was given.
        at_least: its lower limit, where it has one that it may reach.
        above: its lower limit, where it has one that it may not reach.

    Raises:
        ValueError: if it is no finite number, or out of its limits.
    """
    limit = "" if at_least is None else f" of at least {at_least}"
    limit = limit if above is None else f" above {above}"
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (at_least is not None and value < at_least) or (above is not None and value <= above):  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number{limit}, got {value!r}")
    return float(value)  # type: ignore[arg-type]
