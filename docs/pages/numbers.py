"""How numbers are written on the pages: digits, signs, intervals, means with their deviations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

MINUS = "−"


def number(value: float, digits: int = 1) -> str:
    """With so many digits behind the point, commas between thousands, and a minus sign."""
    return f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value: float, digits: int = 1) -> str:
    """The same with its sign, whichever it is."""
    return "nan" if math.isnan(value) else f"{value:+,.{digits}f}".replace("-", MINUS)


def significant(value: float, digits: int = 3) -> str:
    """With so many significant digits and no exponent, commas between thousands."""
    if math.isnan(value) or value == 0.0:
        return "nan" if math.isnan(value) else "0"
    places = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return number(round(value, places), max(0, places))


def interval(low: float, high: float, digits: int = 1, scale: float = 1.0) -> str:
    """[low, high] with their signs."""
    return f"[{signed(low * scale, digits)}, {signed(high * scale, digits)}]"


def least_to_most(values: Iterable[float], digits: int = 1, with_sign: bool = False) -> str:
    """`0.1 to 0.3`, of the least and the largest; one number where they are written alike."""
    ordered, write = sorted(values), signed if with_sign else number
    return " to ".join(dict.fromkeys(write(value, digits) for value in (ordered[0], ordered[-1])))


def mean_std(values: Sequence[float] | np.ndarray, digits: int = 1, scale: float = 1.0) -> str:
    """Mean ± standard deviation of seeds; the mean alone of one."""
    mean = number(float(np.mean(values)) * scale, digits)
    return f"{mean} ± {number(float(np.std(values, ddof=1)) * scale, digits)}" if len(values) > 1 else mean


def in_turn(texts: Iterable[str]) -> str:
    """All texts: `a`, `a and b`, `a, b and c`; `none` where there is none."""
    *before, last = [*texts] or ["none"]
    return f"{', '.join(before)} and {last}" if before else last


def p_value(value: float) -> str:
    """Three digits behind the point, or that it is less."""
    return "< 0.001" if value < 0.001 else number(value, 3)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])
