"""Tests of the last checkpoints of a comparison's cells: the table of each is in VARIANT/seed_N.csv.

Beside it, in seed_N.json, may stand where the test ran (`environment.json` of its run).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docs.pages.errors import PageError
from docs.pages.raw import RESULTS, Comparison, asked_of, by_machine, json_of, with_first
from docs.pages.tables import Table, nothing_yet, verdicts
from lightning_tasks.compare.cell import folder_name
from lightning_tasks.compare.plan import summary_references
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.runs.environment import Environment, parse_environment
from lightning_tasks.runs.robustness import Row, read_csv, right_from_text

CLEAN = "//accuracy"
"""The accuracy of clean images, and the mean over corruptions, in a table of tests: neither has a further name."""


def variants(recipe: str) -> list[str]:
    """The names of a comparison's variants, in its order."""
    return [*read_settings(find_recipe(recipe))["variants"]]


@dataclass(frozen=True)
class Tested:
    """What the test of a cell's last checkpoint gave.

    Args:
        variant, seed: the cell.
        path: its table.
        rows: those of one test, by `name/setting/metric`.
        environment: where the test ran, if that was kept.
    """

    variant: str
    seed: int
    path: Path
    rows: Mapping[str, Row]
    environment: Environment | None = None


def tested(folder: Path, recipe: str, test: str) -> list[Tested]:
    """The rows of a test in each table that is there, in the order of the recipe's variants, and by seed.

    Raises:
        PageError: a file is of no variant or seed or is damaged, or a table has other rows, another number of samples
            or other settings than the first one, or a value that was not measured.
    """
    found: list[Tested] = []
    known = {folder_name(variant): variant for variant in variants(recipe)}
    paths = {path for path in folder.rglob("[!.]*") if path.is_file()}
    for name, variant in known.items():
        seeds = {path: re.fullmatch(r"seed_(0|[1-9]\d*)\.csv", path.name) for path in (folder / name).glob("*")}
        of_seed = {int(match[1]): path for path, match in seeds.items() if match}
        paths -= {path.with_suffix(suffix) for path in of_seed.values() for suffix in (".csv", ".json")}
        found += [
            Tested(variant, seed, path, _rows(path, test), environment_of(path.with_suffix(".json")))
            for seed, path in sorted(of_seed.items())
        ]
    if paths:
        raise PageError(
            f"{min(paths)} is none of VARIANT/seed_N.csv or seed_N.json beside it, VARIANT of {', '.join(known)}"
        )
    for each in found[1:]:
        _check_alike(found[0], each)
    return found


def check_checkpoints(
    cells: Sequence[Tested], name: str, found: Comparison, metric: str, source: str = RESULTS
) -> None:
    """Refuse tests of other checkpoints than a comparison's, by what both say of one metric.

    Args:
        cells: the tests.
        name: of their row.
        found: the comparison.
        metric: what it calls the same.
        source: the file that the comparison's values are from.

    Raises:
        PageError: a cell is in one of them alone, diverged, or has other values.
    """
    for config in dict.fromkeys([*found.configs, *(each.variant for each in cells)]):
        logged = found.by_seed(metric, config) if config in found.configs else {}
        there = {each.seed: each for each in cells if each.variant == config}
        if alone := logged.keys() ^ there.keys():
            where = source if min(alone) in logged else there[min(alone)].path
            raise PageError(f"{config} seed {min(alone)} is in {where} alone: test the last checkpoint of each cell")
        for seed, each in there.items():
            value = each.rows[name].value
            if math.isnan(logged[seed]):  # also where a score was logged
                raise PageError(
                    f"{config} seed {seed} diverged, so that nothing says whether {each.path} is a test of its "
                    "checkpoint: leave that table out"
                )
            if not math.isclose(value, logged[seed], rel_tol=1e-5):
                raise PageError(
                    f"{each.path} has {value} where {source} has {logged[seed]} for {metric}: it is a test of another "
                    "checkpoint"
                )


def _rows(path: Path, test: str) -> dict[str, Row]:
    try:
        rows = [row for row in read_csv(path) if row.test == test]
        for row in rows:
            if row.right and abs(right_from_text(row.right, row.samples).mean() - row.value) * row.samples > 0.5:
                raise ValueError(f"{row.label} is {row.value}, and its images say something else")
    except (ValueError, TypeError, csv.Error) as error:  # a line is too short or too long, a field too large
        raise PageError(f"{path} is damaged: {error}") from error
    named = {f"{row.name}/{row.setting}/{row.metric}": row for row in rows}
    if not rows or len(named) < len(rows):
        raise PageError(f"{path} has {'a row twice' if rows else 'no row'} of the test {test!r}")
    if absent := [name for name, row in named.items() if not row.is_measured]:
        raise PageError(f"{path}: {absent[0]} was not measured")
    return named


def _check_alike(first: Tested, other: Tested) -> None:
    if strange := sorted(first.rows.keys() ^ other.rows.keys()):
        raise PageError(f"{first.path} and {other.path} have other rows: {strange[0]} is in one alone")
    for name, row in other.rows.items():
        said = [(each.samples, settings_of(each.note)) for each in (first.rows[name], row)]
        if said[0] != said[1]:
            raise PageError(f"{first.path} and {other.path} have other settings of {name}: {said[0]} and {said[1]}")


def environment_of(path: Path) -> Environment | None:
    """Where a test ran, as `environment.json` says; None where there is no such file.

    Raises:
        PageError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        return parse_environment(json_of(path))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise PageError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def tests_ran_in(cells: Sequence[Tested]) -> str:
    """The code and the machines of tests.

    Raises:
        PageError: it was not kept of one of them.
    """
    if lacking := [each.path for each in cells if each.environment is None]:
        raise PageError(f"{lacking[0].with_suffix('.json')} is missing: copy environment.json of the test there")
    return by_machine([each.environment for each in cells if each.environment is not None])


def settings_of(note: str) -> str:
    """What a note says of the settings, without what was found."""
    return note.partition("; flags: ")[0]


def compare_tests(
    folder: Path, recipe: str, test: str, primary: str, metrics: Sequence[str] | None = None
) -> Comparison | None:
    """The rows of one test as metrics, compared as the recipe's variants are; None where there are no tables yet.

    Raises:
        PageError: there are tables and none of the first variant, or they are not alike.
    """
    found = tested(folder, recipe, test)
    if not found:
        return None
    rows: list[dict[str, Any]] = [
        {"config": each.variant, "seed": each.seed, "step": 0, "metric": name, "value": row.value}
        for each in found
        for name, row in each.rows.items()
    ]
    configs = with_first(variants(recipe), {each.variant for each in found}, folder)
    named = {name: [*filter(configs.__contains__, others)] for name, others in summary_references([recipe]).items()}
    endpoints = replace(asked_of(recipe), primary=primary, margins={})
    return Comparison(rows, metrics or [*found[0].rows], named, endpoints, configs)


def primary_table(found: Comparison | None, metric: str) -> Table:
    """The primary endpoint, a share, in percent; a row for each reference."""
    if found is None:
        return nothing_yet("configuration", "mean ± std")
    return verdicts(found, metric, {name: name for name in found.configs}, 1, 100.0, seeds=True)
