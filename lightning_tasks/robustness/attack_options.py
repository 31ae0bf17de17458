"""The values that options of attacks may have, by name: an option means the same in every attack that has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "restarts": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "queries": (lambda value: _whole(value, 1), "an integer of at least 1"),
    "samples": (lambda value: _whole(value, 2) and value % 2 == 0, "an even integer of at least 2"),
    "step_size": (lambda value: value is None or _positive(value), "a positive number, or None for 2.5 eps / steps"),
    "delta": (_positive, "a positive number"),
    "learning_rate": (_positive, "a positive number"),
    "initial_share": (lambda value: _positive(value) and value <= 1, "a number above 0 and at most 1"),
    "random_start": (lambda value: isinstance(value, bool), "True or False"),
    "std": (
        lambda value: isinstance(value, Sequence) and len(value) > 0 and all(_positive(each) for each in value),
        "a list of positive numbers, one a channel",
    ),
}


def check_options(**options: Any) -> None:
    """Check the values of options of an attack.

    Raises:
        ValueError: for the first that is out of its limits.
    """
    for name, value in options.items():
        allowed, what = _ALLOWED[name]
        if not allowed(value):
            cure = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
            raise ValueError(f"{name}={value!r} must be {what}{cure}")
