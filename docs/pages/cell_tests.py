"""Tests of the last checkpoints of a comparison's cells: the table of each is in VARIANT/seed_N.csv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from docs.pages.raw import Comparison, asked_of, with_first
from docs.pages.tables import Table, verdicts
from lightning_tasks.compare.cell import folder_name
from lightning_tasks.compare.plan import summary_references
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.runs.robustness import Row, read_csv

NOTHING = "no numbers yet"


def variants(recipe: str) -> list[str]:
    """The names of a comparison's variants, in its order."""
    return [*read_settings(find_recipe(recipe))["variants"]]


def tables(folder: Path, recipe: str) -> Iterator[tuple[str, int, list[Row]]]:
    """The variant, the seed and the rows of each table that is there, in the order of the recipe's variants."""
    for variant in variants(recipe):
        for path in sorted((folder / folder_name(variant)).glob("seed_*.csv")):
            yield variant, int(path.stem.removeprefix("seed_")), read_csv(path)


def compare_tests(folder: Path, recipe: str, test: str, metrics: Sequence[str], primary: str) -> Comparison | None:
    """The rows of one test as metrics `name/setting/metric`, compared as the recipe's variants are.

    None where there are no tables yet.

    Raises:
        PageError: there are tables, and none of the first variant.
    """
    rows: list[dict[str, Any]] = [
        {
            "config": variant,
            "seed": seed,
            "step": 0,
            "metric": f"{row.name}/{row.setting}/{row.metric}",
            "value": row.value,
        }
        for variant, seed, table in tables(folder, recipe)
        for row in table
        if row.test == test
    ]
    if not rows:
        return None
    configs = with_first(variants(recipe), {row["config"] for row in rows}, folder)
    endpoints = replace(asked_of(recipe), primary=primary, margins={})
    return Comparison(rows, metrics, summary_references([recipe]), endpoints, configs)


def primary_table(found: Comparison | None, metric: str) -> Table:
    """The primary endpoint, a share, in percent; a row for each reference."""
    if found is None:
        return Table(["configuration", "mean ± std"], [[NOTHING, ""]])
    return verdicts(found, metric, {name: name for name in found.configs}, 1, 100.0, seeds=True)
