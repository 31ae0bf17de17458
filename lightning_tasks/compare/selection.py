"""The values that a comparison chooses for its variants, each tried on seeds that its table does not use."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_modules.mechanism import did_you_mean
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.choice import NOTHING, Choice, Tried, key_of, label
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.statistics import last_values
from lightning_tasks.compare.tables import collect_results
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.schema import is_part_of
from lightning_tasks.recipes.variants import Variant, find_named
from lightning_tasks.runs.divergence import diverged_cells

FOLDER = "selection"
_OF_FIT = re.compile(r"(train|val|valid|validation)[/_]\S(.*\S)?")


@dataclass(frozen=True)
class Select:
    """How a value is chosen: by the mean of the last values of `metric` over `seeds`, the largest or the smallest.

    Args:
        metric: of training or validation.
        mode: "max" or "min", as Lightning's callbacks have it.
        seeds: none of the table's.
    """

    metric: str
    mode: str
    seeds: tuple[int, ...]


def read_select(names: Sequence[str], seeds: Sequence[int]) -> Select | None:
    """How the comparison files of these names choose, for a table of `seeds`; None where none of them does.

    Raises:
        UsageError: `select` has another shape, a metric of the test data, or a seed of the table; or two files differ.
    """
    found = {}
    for named in map(find_named, names):
        if named.variant is None and (comparison := named.comparison) and comparison.grid:
            found[comparison.path] = _select(comparison.path, comparison.select)
    if len(set(found.values())) > 1:
        raise UsageError(f"{' and '.join(map(str, found))} have different `select`: compare them one by one")
    for path, select in found.items():
        if shared := [seed for seed in seeds if seed in select.seeds]:
            raise UsageError(
                f"--seeds has {shared[0]}, by which `select` in {path} chooses; a table has other seeds than that"
            )
        return select
    return None


def _select(path: Path, given: Any) -> Select:
    shaped = isinstance(given, dict) and given.keys() == {"metric", "mode", "seeds"}
    metric, mode, seeds = (given[key] for key in ("metric", "mode", "seeds")) if shaped else ("", "", [])
    if (
        not (isinstance(metric, str) and metric and mode in ("max", "min") and isinstance(seeds, list) and seeds)
        or len(set(map(repr, seeds))) < len(seeds)
        or not all(type(seed) is int and 0 <= seed < 1 << 32 for seed in seeds)
    ):
        raise UsageError(
            f"{path}: `select` must be `{{metric: name, mode: max or min, seeds: [number]}}`, each seed once, "
            f"got {given!r}"
        )
    if not _OF_FIT.fullmatch(metric):
        raise UsageError(
            f"{path}: `select` by {metric!r} might choose on the test data; take a metric of validation or training, "
            "whose name begins with val/, val_, valid_, train/ or train_"
        )
    return Select(metric, mode, tuple(seeds))


def candidates(variant: Variant) -> list[Variant]:
    """The variant with each combination of its grid, as configurations of their own, which are not tested."""
    return [
        replace(
            variant,
            name=f"{variant.name} {label(each)}",
            overrides=(*variant.overrides, *each),
            test=False,
            grid=(),
        )
        for each in variant.grid
    ]


def plan_selection(
    variants: Sequence[Variant], select: Select | None, output: Path, extra: Sequence[str], comparison: str
) -> list[Cell]:
    """Every cell that is needed to choose for the variants that have a grid: cells as others, in a folder of their own.

    Raises:
        UsageError: an argument of `extra` sets what the grid sets; or two candidates are of one name.
    """
    if select is None:
        return []
    searched = {key_of(each) for variant in variants for overrides in variant.grid for each in overrides}
    for key in map(key_of, extra):
        for other in sorted(searched):
            if is_part_of(key, other) or is_part_of(other, key):
                spelled = "" if key == other else f" ({other})"
                raise UsageError(f"--set {key} would take the place of every value in `grid`{spelled}; leave it out")
    tried = [each for variant in variants for each in candidates(variant)]
    cells = plan_cells(tried, select.seeds, output, extra, comparison)
    return [replace(cell, place=FOLDER) for cell in cells]


def choose(variants: Sequence[Variant], cells: Sequence[Cell], select: Select | None) -> list[Choice]:
    """What the finished `cells` of the selection say of each variant whose cells all are.

    The first of the best is chosen. A combination of which a run diverged, or has no finite score, is never chosen;
    where all are such, the choice is :data:`NOTHING`.

    Raises:
        UsageError: one of them did not log the metric.
    """
    if select is None:
        return []
    finished = {(cell.name, cell.seed): cell for cell in cells if cell.is_finished()}
    needed = {
        variant: [(each.name, seed) for each in candidates(variant) for seed in select.seeds] for variant in variants
    }
    return [
        _choice(variant, collect_results(finished[key] for key in keys), select)
        for variant, keys in needed.items()
        if keys and finished.keys() >= {*keys}
    ]


def _choice(variant: Variant, rows: Sequence[dict[str, Any]], select: Select) -> Choice:
    values, diverged = last_values(rows, select.metric), diverged_cells(rows)
    tried = []
    for each, overrides in zip(candidates(variant), variant.grid, strict=True):
        why = "; ".join(f"seed {seed}: {text}" for (name, seed), text in diverged.items() if name == each.name)
        scores = values.get(each.name, {})
        if not why and len(scores) < len(select.seeds):
            logged = sorted({row["metric"] for row in rows})
            near = did_you_mean(select.metric, logged)
            raise UsageError(
                f"`select`: {each.name} never logged {select.metric};{near} logged are {', '.join(logged)}"
            )
        score = math.nan if why else float(np.mean([*scores.values()]))
        tried.append(Tried([*overrides], score, why or ("" if math.isfinite(score) else f"{select.metric} is {score}")))
    sign = 1.0 if select.mode == "max" else -1.0
    ranks = [-math.inf if each.diverged else sign * each.score for each in tried]
    best = NOTHING if all(each.diverged for each in tried) else ranks.index(max(ranks))
    return Choice(variant.name, select.metric, select.mode, [*select.seeds], tried, best)


def chosen(variants: Sequence[Variant], choices: Sequence[Choice]) -> list[Variant]:
    """The variants with what was chosen for them.

    One for which nothing is chosen keeps its grid. What it is asked to do is then no command line, so that no
    result of other settings is taken for one of it.
    """
    found = {each.variant: tuple(each.tried[each.chosen].overrides) for each in choices if each.chosen != NOTHING}
    return [
        replace(variant, overrides=(*variant.overrides, *found[variant.name]), grid=())
        if variant.name in found
        else replace(variant, overrides=(*variant.overrides, *(f"one of {label(each)}" for each in variant.grid)))
        for variant in variants
    ]
