"""Checks of the options of mechanisms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real

from attention_modules.base import AttentionSpec

MOST_REPEATS = 1000  # of what a mechanism does again and again in a call: more is a slip, or no end
LARGEST_TABLE = 2**32  # numbers that one layer may learn for its positions: 16 GiB in float32
# Of float32, in which mechanisms compute; a number below the smallest may be 0 there.
LARGEST_NUMBER, SMALLEST_NUMBER = (2 - 2**-23) * 2.0**127, 2.0**-126


def check_choice(name: str, value: str, known: Sequence[str]) -> str:
    """An option that is one of a few words.

    Raises:
        ValueError: if it is none of them.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def check_flag(name: str, value: object) -> bool:
    """An option that is True or False.

    Raises:
        ValueError: if it is neither.
    """
    if not isinstance(value, bool):
        cure = ", a string: write it without quotes" if isinstance(value, str) else ""
        raise ValueError(f"{name} must be True or False, got {value!r}{cure}")
    return value


def as_float(value: object) -> float:
    """The float of a real number; NaN of what is none, as a bool or a tensor, and of one that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def check_number(
    name: str, value: object, at_least: float = -math.inf, at_most: float = math.inf, above: float = -math.inf
) -> float:
    """An option that is a finite number, of those that float32 holds.

    Args:
        name: of the option.
        value: what was given.
        at_least: its lower limit.
        at_most: its upper limit.
        above: a lower limit that it may not reach, in float32 either.

    Raises:
        ValueError: if it is no finite number, one that float32 does not hold, or out of its limits.
    """
    number = as_float(value)
    # Comparisons alone: with dynamic=True, torch.compile cannot look into math.isfinite of an option.
    held = abs(number) <= LARGEST_NUMBER and number - above >= SMALLEST_NUMBER
    if not (held and at_least <= number <= at_most):
        limits = {"of at least": at_least, "at most": at_most, "above": above}
        said = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
        beyond = LARGEST_NUMBER < abs(number) < math.inf or above < number < above + SMALLEST_NUMBER
        cause = ", which float32 does not hold" if beyond else ""
        raise ValueError(f"{name} must be a finite number{said and ' '}{said}, got {value!r}{cause}")
    return number


def check_integer(name: str, value: object, at_least: int, at_most: int | None = None) -> int:
    """An option that is an integer.

    Raises:
        ValueError: if it is none, or out of its limits.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    if at_most is not None and int(value) > at_most:
        raise ValueError(f"{name} must be an integer of at most {at_most:,}, got {int(value):,}")
    return int(value)


def check_table(sizes: tuple[int, ...], longest: int, otherwise: str = "") -> tuple[int, ...]:
    """The sizes of a table that is learned for sequences of some length, where memory may hold it.

    Args:
        sizes: of the table.
        longest: the number of tokens that it is for.
        otherwise: what else the user could do.

    Raises:
        ValueError: if it has more numbers than any layer should.
    """
    count = math.prod(sizes)
    if count > LARGEST_TABLE:
        raise ValueError(
            f"num_tokens={longest:,} needs a table of {' x '.join(map(str, sizes))} = {count:,} numbers in this layer, "
            f"and {LARGEST_TABLE:,} are the most; give a smaller num_tokens{otherwise}"
        )
    return sizes


def spec_of_length(
    spec: AttentionSpec, num_tokens: int | None, learns: str, otherwise: str = ""
) -> tuple[AttentionSpec, int]:
    """The spec with the longest sequence, and that length.

    Args:
        spec: of the layer.
        num_tokens: the option, before which that of the spec is nothing.
        learns: what needs it, as "dam learns a gate for each distance".
        otherwise: what else the user could do.

    Raises:
        ValueError: if nothing says how many tokens there are at most.
    """
    longest = spec.num_tokens if num_tokens is None else num_tokens
    if longest is None:
        raise ValueError(
            f"{learns}, and nothing here says how many tokens there are at most; give it the option num_tokens=N"
            f"{otherwise}"
        )
    return replace(spec, num_tokens=longest), longest


def check_length(name: str, tokens: int, limit: int) -> None:
    """Refuse more tokens than the mechanism has parameters for.

    Raises:
        ValueError: if there are.
    """
    if tokens > limit:
        raise ValueError(
            f"{name} was built for at most {limit} tokens, got {tokens}; shorten the input, or give the mechanism the "
            f"option num_tokens={tokens}"
        )
