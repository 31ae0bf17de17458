"""How numbers are written on the pages: digits, signs, intervals, means with their deviations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_FLOOR, Decimal

import numpy as np

from lightning_tasks.compare.summary import SummaryRow

MINUS = "−"


def number(value: float, digits: int = 1) -> str:
    """With so many digits behind the point, commas between thousands, and a minus sign."""
    return f"{value:,.{digits}f}".replace("-", MINUS)


def at_least(value: float, digits: int = 1) -> str:
    """The same, rounded down: a bound that holds as it is written."""
    return number(float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR)), digits)


def signed(value: float, digits: int = 1) -> str:
    """The same with its sign, whichever it is."""
    return "nan" if math.isnan(value) else f"{value:+,.{digits}f}".replace("-", MINUS)


def significant(value: float, digits: int = 3) -> str:
    """With so many significant digits and no exponent, commas between thousands."""
    if math.isnan(value) or value == 0.0:
        return "nan" if math.isnan(value) else "0"
    places = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return number(round(value, places), max(0, places))


def least_to_most(values: Iterable[float], digits: int = 1) -> str:
    """`0.1 to 0.3`, of the least and the largest; one number where they are written alike."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(number(each, digits) for each in (found[0], found[-1])))


def interval(low: float, high: float, digits: int = 1, scale: float = 1.0) -> str:
    """[low, high] with their signs."""
    return f"[{signed(low * scale, digits)}, {signed(high * scale, digits)}]"


def mean_std(values: Sequence[float] | np.ndarray, digits: int = 1, scale: float = 1.0) -> str:
    """Mean ± standard deviation of seeds; the mean alone of one."""
    mean = number(float(np.mean(values)) * scale, digits)
    return f"{mean} ± {number(float(np.std(values, ddof=1)) * scale, digits)}" if len(values) > 1 else mean


def in_turn(texts: Iterable[str]) -> str:
    """All texts: `a`, `a and b`, `a, b and c`; `none` where there is none."""
    *before, last = [*texts] or ["none"]
    return f"{', '.join(before)} and {last}" if before else last


def listed(texts: Iterable[str]) -> str:
    """The same, each text once."""
    return in_turn(dict.fromkeys(texts))


def difference(row: SummaryRow, digits: int = 1, scale: float = 1.0) -> str:
    """The paired difference of a row of the summary, with its 95% interval; "" where nothing is paired."""
    if row.pairs == 0:
        return ""
    return f"{signed(row.difference * scale, digits)} {interval(row.low, row.high, digits, scale)}"


def told(row: SummaryRow, digits: int = 1, scale: float = 1.0) -> str:
    """The same with its verdict."""
    return f"{difference(row, digits, scale)} ({row.verdict})"
