"""The raw files of a page: tables of comparisons, other CSV files, and what a comparison's file says of its metrics."""

from __future__ import annotations

import csv
import json
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from docs.pages.errors import PageError
from lightning_tasks.compare.choice import NOTHING, Choice, parse_choice, written
from lightning_tasks.compare.formats import IMAGES, said_of
from lightning_tasks.compare.plan import summary_endpoints, summary_metrics, summary_references
from lightning_tasks.compare.statistics import last_values
from lightning_tasks.compare.summary import (
    Endpoints,
    ImageInterval,
    PairedCell,
    SummaryRow,
    count_comparisons,
    summarize,
    unpaired,
)
from lightning_tasks.recipes import find_recipe, read_settings
from lightning_tasks.runs.divergence import STOPPED, Row, diverged_cells, with_stops
from lightning_tasks.runs.environment import Environment, mixed_environments, parse_environment
from lightning_tasks.runs.log import by_metric

COMPARISON, RESULTS = "comparison.json", "results.csv"
FINISHED = "finished"  # a cell's state
Kept = TypeVar("Kept")
Record = TypeVar("Record")
_COLUMNS = ("config", "seed", "step", "metric", "value")
_KINDS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}


@dataclass(frozen=True)
class Comparison:
    """The values of finished cells, and what was said of the metrics before.

    Args:
        rows: config, seed, step, metric, value.
        metrics: those of the summary.
        references: further ones than the first configuration.
        endpoints: the primary one, and margins.
        configs: the configurations, the first of which is the reference of all others.
        choices: values that were chosen on other seeds.
        cells: what `comparison.json` says of each cell.
        images: the intervals over images, as `attnswap compare` found them.
        environments: those in which cells ran.
    """

    rows: Sequence[Row]
    metrics: Sequence[str]
    references: Mapping[str, Sequence[str]]
    endpoints: Endpoints
    configs: Sequence[str]
    choices: Sequence[Choice] = ()
    cells: Sequence[Mapping[str, Any]] = ()
    images: Sequence[ImageInterval] = ()
    environments: Sequence[Environment] = ()

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of any configuration."""
        return sorted({row["seed"] for row in self.rows})

    @cached_property
    def summary(self) -> list[SummaryRow]:
        """What `attnswap compare` makes of these rows."""
        return summarize(self.rows, self.configs, self.metrics, self.references, self.endpoints)

    @cached_property
    def remarks(self) -> dict[str, list[str]]:
        """What the summary lists below its tables, by title."""
        stopped = {(row["config"], row["seed"]) for row in self.rows if row["metric"] == STOPPED}
        finished = [each for each in self.cells if each["state"] == FINISHED]
        paired = [
            PairedCell(
                each["variant"],
                each["seed"],
                each["initial_weights"],
                each["training_data"],
                (each["variant"], each["seed"]) in stopped,
            )
            for each in finished
        ]
        return {
            "Chosen": list(map(str, self.choices)),
            "Diverged": [f"{name} seed {seed}: {text}" for (name, seed), text in diverged_cells(self.rows).items()],
            "Not paired": unpaired(paired),
            "Environments": mixed_environments(self.environments),
            "Intervals": said_of(self.images),
            "Not finished": [f"{each['variant']} seed {each['seed']}" for each in self.cells if each not in finished],
        }

    @cached_property
    def _by_metric(self) -> dict[str, list[Row]]:
        return by_metric(self.rows)

    @cached_property
    def _others(self) -> dict[tuple[str, str, str], SummaryRow]:
        return {}

    def values(self, metric: str, config: str, step: int | None = None) -> np.ndarray:
        """Values by seed, ``[seeds]``: the last ones, or those of a step.

        Raises:
            PageError: no such value was logged.
        """
        return np.array([*self.by_seed(metric, config, step).values()])

    def by_seed(self, metric: str, config: str, step: int | None = None) -> dict[int, float]:
        """The same by seed, in their order.

        Raises:
            PageError: no such value was logged.
        """
        rows = [row for row in self._by_metric.get(metric, ()) if step is None or row["step"] == step]
        found = last_values(rows, metric).get(config)
        if not found:
            place = "" if step is None else f" at step {step}"
            raise PageError(f"{RESULTS} has no {metric} of {config}{place}")
        return dict(sorted(found.items()))

    def has(self, metric: str, config: str) -> bool:
        """Whether any run of the configuration logged it."""
        return any(row["config"] == config for row in self._by_metric.get(metric, ()))

    def mean(self, metric: str, config: str, step: int | None = None) -> float:
        """The mean of these over seeds."""
        return float(self.values(metric, config, step).mean())

    def at(self, step: int) -> Comparison:
        """The same of what was logged at one step; do not use its verdicts, which no correction counts."""
        return replace(self, rows=[row for row in self.rows if row["step"] == step], images=())

    def chosen(self, config: str) -> str:
        """What was chosen for a configuration, as `lr=0.001`.

        Raises:
            PageError: there was nothing to choose from, or nothing was chosen.
        """
        for choice in self.choices:
            if choice.variant == config and choice.chosen != NOTHING:
                return written(choice.tried[choice.chosen].overrides)
        raise PageError(f"{COMPARISON} has nothing that was chosen for {config}")

    def row(self, metric: str, config: str, reference: str) -> SummaryRow:
        """The paired differences of a configuration to a reference.

        A metric or reference that is none of the comparison's is in no family that p-values are corrected for: do not
        use its verdict.
        """
        for row in self.summary:
            if (row.metric, row.config, row.reference) == (metric, config, reference):
                return row
        place = metric, config, reference
        if place not in self._others:
            rows = summarize(self._by_metric.get(metric, []), [reference, config], [metric])
            if len(rows) < 2:
                raise PageError(f"{RESULTS} has no {metric} of {config} and {reference}")
            self._others[place] = rows[-1]
        return self._others[place]

    def over_images(self, metric: str, config: str, reference: str) -> ImageInterval:
        """The interval over images of the differences of a configuration to a reference.

        Raises:
            PageError: there is none.
        """
        for each in self.images:
            if (each.metric, each.config, each.reference) == (metric, config, reference):
                return each
        raise PageError(f"{IMAGES} has no interval of {metric} of {config} to {reference}")

    def seconds(self, *configs: str) -> list[float]:
        """What each finished cell took, of these configurations, or of all.

        Raises:
            PageError: it was not kept.
        """
        found = []
        for cell in self.cells:
            if cell["state"] == FINISHED and cell["variant"] in (configs or self.configs):
                taken = cell.get("seconds")
                if not isinstance(taken, (int, float)) or not math.isfinite(taken):
                    raise PageError(f"{COMPARISON} has {taken!r} as the seconds of {cell['variant']} {cell['seed']}")
                found.append(float(taken))
        if not found:
            raise PageError(f"{COMPARISON} has no finished cell of {', '.join(configs or self.configs)}")
        return found

    def with_metric(self, name: str, of: Callable[..., float], *metrics: str) -> Comparison:
        """The same with a further metric, computed for each run of the last values of others."""
        values = [last_values(self._by_metric[metric], metric) for metric in metrics]
        rows = [
            {"config": config, "seed": seed, "step": 0, "metric": name, "value": of(*(v[config][seed] for v in values))}
            for config in self.configs
            for seed in values[0][config]
        ]
        made = replace(self, rows=[*self.rows, *rows])
        made.__dict__["summary"] = self.summary
        return made


class Raw:
    """The folder of a page's raw files; each is read once."""

    def __init__(self, root: Path, folder: str) -> None:
        self.root = root
        self.folder = root / folder
        self._read: dict[Any, Any] = {}

    def comparison(self, place: str, recipe: str) -> Comparison:
        """The comparison in a folder; `recipe` says what was asked where no `comparison.json` does.

        A recipe that is not shipped is a path from the root of the repository.

        Raises:
            PageError: there is no table.
        """
        file = self.root / recipe
        name = str(file) if file.is_file() else recipe
        return self.once(("comparison", place, recipe), lambda: _comparison(self.folder / place, name))

    def choices(self, place: str) -> list[Choice]:
        """What was chosen in a folder whose comparison went no further.

        Raises:
            PageError: there is no `comparison.json`, or it is damaged.
        """
        path = _existing(self.folder / place / COMPARISON)
        try:
            return [parse_choice(each) for each in json_of(path)["choices"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise PageError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    def rows(self, name: str, folder: Path | None = None) -> list[dict[str, str]]:
        """The rows of a CSV file.

        Raises:
            PageError: there is no such file.
        """
        return self.once(("rows", name, folder), lambda: read_csv((folder or self.folder) / name))

    def records(self, name: str, kind: type[Record], grid: Sequence[str] = ()) -> list[Record]:
        """The rows of a CSV file as dataclasses of numbers, texts and truths.

        Args:
            name: of the file.
            kind: the dataclass.
            grid: fields of which each combination of values has one row, and whose table has finite numbers alone.

        Raises:
            PageError: there is no such file, it has no rows, a line is damaged, or it is no such grid.
        """
        of = {field.name: _KINDS[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
        path = self.folder / name

        def read() -> list[Record]:
            found = _parsed(path, lambda line: kind(**{key: of[key](value) for key, value in line.items()}))
            if not found:
                raise PageError(f"{path} has no rows")
            if grid:
                _check_grid(path, found, grid)
            return found

        return self.once(("records", name), read)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of an .npz file, by name.

        Raises:
            PageError: there is no such file, or it is damaged.
        """
        path = _existing(self.folder / name)
        try:
            with np.load(path, allow_pickle=False) as found:
                return dict(found)
        except (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise PageError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    def text(self, name: str) -> str:
        """The text of a file."""
        return _existing(self.folder / name).read_text(encoding="utf-8")

    def step_costs(self, recipe: str, required: bool = True) -> list[dict[str, str]]:
        """What a training step of each variant costs, as the benchmark measured it; nothing where it need not have."""
        folder, name = self.root / "benchmarks" / "results", f"training_step_{recipe.replace('/', '_')}.csv"
        return self.rows(name, folder) if required or (folder / name).is_file() else []

    def once(self, key: object, read: Callable[[], Kept]) -> Kept:
        """What `read` returns, at the first call with a key."""
        if key not in self._read:
            self._read[key] = read()
        return self._read[key]


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        PageError: there is no such file.
    """
    with _existing(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise PageError(f"{path} is missing, and a page is made from it")
    return path


def _check_grid(path: Path, rows: Sequence[Any], grid: Sequence[str]) -> None:
    counted = Counter(tuple(getattr(row, name) for name in grid) for row in rows)
    for key in product(*(dict.fromkeys(values) for values in zip(*counted, strict=True))):
        if counted[key] != 1:
            place = ", ".join(f"{name} {value}" for name, value in zip(grid, key, strict=True))
            raise PageError(f"{path} has {counted[key]} rows of {place}, and should have one")
    for number, row in enumerate(rows, start=2):
        for name, value in vars(row).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise PageError(f"{path}, line {number}: {name} is {value}, which is no finite number")


def _parsed(path: Path, parse: Callable[[dict[str, str]], Record]) -> list[Record]:
    """The rows of a CSV file, parsed.

    Raises:
        PageError: there is no such file, or a line that holds something else.
    """
    found = []
    for number, line in enumerate(read_csv(path), start=2):
        try:
            found.append(parse(line))
        except (KeyError, TypeError, ValueError) as error:
            raise PageError(f"{path}, line {number}, is damaged ({type(error).__name__}: {error})") from error
    return found


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
    rows = _parsed(path, _row)
    if not rows:
        raise PageError(f"{path} has no rows")
    counted = Counter((row["config"], row["seed"], row["metric"], row["step"]) for row in rows)
    ((config, seed, metric, step), most), *_ = counted.most_common(1)
    if most > 1:
        raise PageError(f"{path} has {metric} of {config} seed {seed} at step {step} {most} times")
    return rows


def _comparison(folder: Path, recipe: str) -> Comparison:
    found = _as_asked(folder, recipe)
    _check_cells(found, folder)
    pairs = {(row.metric, row.config, row.reference): row.pairs for row in found.summary}
    for each in found.images:
        if pairs.get((each.metric, each.config, each.reference)) != each.seeds:
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
    images = _parsed(folder / IMAGES, _interval) if (folder / IMAGES).is_file() else []
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
        if "comparisons" in asked:
            endpoints = replace(endpoints, comparisons=asked["comparisons"])
        environments = [parse_environment(each) for each in asked.get("environments", [])]
        said = asked["metrics"], asked["references"], endpoints
        return Comparison(rows, *said, configs, choices, asked["cells"], images, environments)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
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


def json_of(path: Path) -> Any:
    """What a JSON file holds; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
