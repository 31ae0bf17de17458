"""Rows of tables: pairwise products, and tables that one test goes through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from math import comb
from random import Random
from typing import Any

import torch


def pairwise(*factors: Iterable[Hashable], allowed: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Rows of a product with every pair that an allowed row has, in its order; the same at every call."""
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


def each_row(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each row of a table, as ``pytest.mark.parametrize`` does, but as one test."""
    names, table = ([names], [(row,) for row in rows]) if isinstance(names, str) else (list(names), list(rows))
    assert not any(getattr(row, "marks", ()) for row in table), "a row with a mark is a test of its own: parametrize it"
    table = [row.values if hasattr(row, "marks") else row for row in table]  # of pytest.param

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(subtests: Any, **fixtures: Any) -> None:
            root = fixtures.get("tmp_path")
            for number, row in enumerate(table):
                given = dict(zip(names, row, strict=True))
                if root is not None:
                    fixtures["tmp_path"] = root / str(number)
                    fixtures["tmp_path"].mkdir()
                torch.manual_seed(0)
                with subtests.test(**given):
                    function(**given, **fixtures)

        own = inspect.signature(function).parameters
        needed = ["subtests", *(name for name in own if name not in names)]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in needed]
        )
        run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
        run.pytestmark = list(getattr(function, "pytestmark", []))  # type: ignore[attr-defined]
        return run

    return decorate
