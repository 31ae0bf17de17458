"""A comparison, read from the files that `attnswap compare` wrote, and checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import fields, replace
from pathlib import Path

from docs.pages.errors import PageError
from docs.pages.raw.comparison import COMPARISON, FINISHED, RESULTS, Comparison
from docs.pages.raw.tables import json_of, parsed
from lightning_tasks.compare.choice import parse_choice
from lightning_tasks.compare.formats import IMAGES
from lightning_tasks.compare.plan import summary_endpoints, summary_metrics, summary_references
from lightning_tasks.compare.summary import Endpoints, ImageInterval, count_comparisons
from lightning_tasks.json_values import list_of
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.runs.divergence import Row, with_stops
from lightning_tasks.runs.environment import parse_environment

_COLUMNS = ("config", "seed", "step", "metric", "value")


def _interval(line: dict[str, str]) -> ImageInterval:
    if absent := {field.name for field in fields(ImageInterval)} - {*line}:
        raise ValueError(f"it has no column {min(absent)}")
    numbers = {"images": int, "seeds": int, "low": float, "high": float}
    found = ImageInterval(**{key: numbers.get(key, str)(value) for key, value in line.items()})
    if not found.low <= found.high and not (math.isnan(found.low) and math.isnan(found.high)):
        raise ValueError(f"[{found.low}, {found.high}] is no interval")
    return found


def _row(line: dict[str, str]) -> Row:
    if {*line} != {*_COLUMNS}:
        raise ValueError(f"columns are {', '.join(map(str, line))}")
    texts = {key: str(line[key]) for key in ("config", "metric")}
    return {**texts, "seed": int(line["seed"]), "step": int(line["step"]), "value": float(line["value"])}


def read_results(path: Path) -> list[Row]:
    """The logged values.

    Raises:
        PageError: there are none, a line is damaged, or a value is there twice.
    """
    rows = parsed(path, _row)
    if not rows:
        raise PageError(f"{path} has no rows")
    counted = Counter((row["config"], row["seed"], row["metric"], row["step"]) for row in rows)
    ((config, seed, metric, step), most), *_ = counted.most_common(1)
    if most > 1:
        raise PageError(f"{path} has {metric} of {config} seed {seed} at step {step} {most} times")
    return rows


def read_comparison(folder: Path, recipe: str) -> Comparison:
    """The comparison in a folder; `recipe` says what was asked where no `comparison.json` does.

    Raises:
        PageError: there is no table, a file is damaged, or two are of different cells.
    """
    found = _as_asked(folder, recipe)
    _check_cells(found, folder)
    pairs = {(row.metric, row.config, row.reference): row.pairs for row in found.summary}
    for each in found.images:
        paired = pairs.get((each.metric, each.config, each.reference), -1)
        if paired != each.seeds and not (paired == 0 and each.seeds == 1):  # one seed has no paired difference
            raise PageError(
                f"{folder / IMAGES} has an interval of {each.metric} of {each.config} to {each.reference} over "
                f"{each.seeds} seeds, which is none of those in {RESULTS}: copy both from one folder"
            )
    return found


def _check_cells(found: Comparison, folder: Path) -> None:
    """Refuse values of other cells than the record calls finished."""
    if not found.cells:
        return
    finished = {(each["variant"], each["seed"]) for each in found.cells if each["state"] == FINISHED}
    there = {(row["config"], row["seed"]) for row in found.rows}
    for what, places in (("has no values of", finished - there), ("has values of", there - finished)):
        if places:
            config, seed = min(places)
            said = "finished" if places <= finished else "not finished"
            raise PageError(
                f"{folder / RESULTS} {what} {config} seed {seed}, which {COMPARISON} calls {said}: copy both from one "
                "folder"
            )


def _as_asked(folder: Path, recipe: str) -> Comparison:
    rows = with_stops(read_results(folder / RESULTS))
    images = parsed(folder / IMAGES, _interval) if (folder / IMAGES).is_file() else []
    if not (folder / COMPARISON).is_file():
        configs = list(dict.fromkeys(row["config"] for row in rows))
        said = summary_metrics([recipe]), summary_references([recipe]), asked_of(recipe)
        return Comparison(rows, *said, configs, images=images)
    try:
        asked = json_of(folder / COMPARISON)
        if not isinstance(asked, dict):
            raise TypeError(f"it is a {type(asked).__name__}")
        choices = [parse_choice(each) for each in asked.get("choices", [])]
        logged = {row["config"] for row in rows}
        names = [each["name"] for each in asked["variants"]]
        configs = with_first(names, logged, folder)
        # What an earlier version did not write is what the recipe says.
        endpoints = asked_of(recipe)
        if "primary" in asked:
            endpoints = replace(endpoints, primary=asked["primary"], margins=asked["margins"])
            for name, margin in endpoints.margins.items():
                if not 0 < margin < math.inf:
                    raise ValueError(f"the margin of {name} is {margin}, and must be above 0 and finite")
        endpoints = replace(endpoints, changed=list_of(asked.get("changed", []), str))
        if "comparisons" in asked:
            endpoints = replace(endpoints, comparisons=asked["comparisons"])
        # Those of the selection alone come last, and are not the table's.
        ran, chose = ({each.get("environment", -1) for each in asked.get(key, ())} for key in ("cells", "selection"))
        environments = [
            parse_environment(each)
            for place, each in enumerate(asked.get("environments", []))
            if place not in chose - ran
        ]
        said = asked["metrics"], asked["references"], endpoints
        return Comparison(rows, *said, configs, choices, asked["cells"], images, environments)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise PageError(f"{folder / COMPARISON} is damaged ({type(error).__name__}: {error})") from error


def asked_of(recipe: str) -> Endpoints:
    """What a comparison's recipe says of its metrics, and how many differences it asks for."""
    variants = [*read_settings(find_recipe(recipe)).get("variants", {})]
    return replace(summary_endpoints([recipe]), comparisons=count_comparisons(variants, summary_references([recipe])))


def with_first(names: Sequence[str], there: Container[str], folder: Path) -> list[str]:
    """Those of a comparison's variants that have values, in its order.

    Raises:
        PageError: the first one, which all others are compared with, has none.
    """
    if names[0] not in there:
        raise PageError(f"{folder} has no values of {names[0]}, which all others are compared with")
    return [name for name in names if name in there]
