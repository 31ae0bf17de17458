"""Few rows of a product that still hold every pair of values of two factors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations, product
from math import comb
from random import Random
from typing import Any


def pairwise(*factors: Iterable[Hashable], allowed: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Rows with every pair that an allowed row has, in the order of the product; the same at every call.

    Of three factors it is about as many rows as the product of the two largest.
    """
    rows = [row for row in product(*factors) if allowed(*row)]
    order = Random(0).sample(range(len(rows)), len(rows))
    chosen: set[int] = set()
    seen: set[Any] = set()
    for least in range(comb(len(factors), 2), 0, -1):  # first the rows that add most
        for index in order:
            new = set(combinations(enumerate(rows[index]), 2)) - seen
            if len(new) >= least:
                chosen.add(index)
                seen |= new
    return [rows[index] for index in sorted(chosen)]
