"""A comparison, of the files that `attnswap compare` wrote: its values, its summary and its intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from docs.pages import tables
from docs.pages.errors import PageError
from docs.pages.numbers import in_turn
from lightning_tasks.compare.formats import said_of
from lightning_tasks.compare.record import FINISHED, CellRecord, Record, read_record
from lightning_tasks.compare.statistics import last_values
from lightning_tasks.compare.summary import ImageInterval, PairedCell, SummaryRow, not_logged, summarize, unpaired
from lightning_tasks.runs.divergence import STOPPED, Row, diverged_cells, is_loss, with_stops
from lightning_tasks.runs.environment import Environment, mixed_environments

RESULTS, IMAGES = "results.parquet", "images.parquet"


@dataclass(frozen=True)
class Comparison:
    """The values of finished cells, and what `comparison.json` says of them.

    Args:
        record: what was asked for, and what became of each cell.
        rows: the logged values that the summary is made of, those of further metrics, and those of diverged runs.
        images: the intervals over images, as `attnswap compare` found them.
        source: the file of the values.
    """

    record: Record
    rows: list[Row]
    images: list[ImageInterval] = field(default_factory=list)
    source: Path = Path(RESULTS)

    @cached_property
    def configs(self) -> list[str]:
        """The configurations that have values; the first is the reference of all others.

        Raises:
            PageError: the first one has none.
        """
        logged = {row["config"] for row in self.rows}
        if self.record.configs[0] not in logged:
            raise PageError(f"{self.source} has no values of {self.record.configs[0]}, which all are compared with")
        return [name for name in self.record.configs if name in logged]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of any configuration."""
        return sorted({row["seed"] for row in self.rows})

    @cached_property
    def summary(self) -> list[SummaryRow]:
        """What `attnswap compare` makes of these rows."""
        asked = self.record
        return summarize(self.told, self.configs, asked.metrics, asked.references, asked.endpoints)

    @cached_property
    def told(self) -> list[Row]:
        """The rows that the summary depends on: its metrics, the losses and the stops."""
        asked = (*self.record.metrics, STOPPED)
        return [row for name, rows in self._by_metric.items() if name in asked or is_loss(name) for row in rows]

    @cached_property
    def _by_metric(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["metric"], []).append(row)
        return found

    @cached_property
    def _lost(self) -> dict[tuple[str, int], str]:
        return diverged_cells(self.told)

    @cached_property
    def _others(self) -> dict[tuple[str, str, str], SummaryRow]:
        return {(row.metric, row.config, row.reference): row for row in self.summary}

    def by_seed(self, metric: str, config: str, step: int | None = None) -> dict[int, float]:
        """Last values by seed, or those of a step; the last value of a run that diverged is NaN.

        Raises:
            PageError: no such value was logged.
        """
        rows = [row for row in self._by_metric.get(metric, ()) if step is None or row["step"] == step]
        values = last_values(rows, metric).get(config)
        if not values:
            at = "" if step is None else f" at step {step}"
            raise PageError(f"{self.source} has no {metric} of {config}{at}")
        lost = [] if step is not None else [seed for seed in values if (config, seed) in self._lost]
        return dict(sorted((values | dict.fromkeys(lost, math.nan)).items()))

    def values(self, metric: str, config: str, step: int | None = None) -> np.ndarray:
        """The same, ``[seeds]``."""
        return np.array([*self.by_seed(metric, config, step).values()])

    def row(self, metric: str, config: str, reference: str) -> SummaryRow:
        """The paired differences of a configuration to a reference.

        A metric or reference that the comparison did not name is in no family that p-values are corrected for: its
        verdict must not be used.
        """
        key = metric, config, reference
        if key not in self._others:
            causes = [
                row
                for row in self.told
                if (row["config"], row["seed"]) in self._lost and (row["metric"] == STOPPED or is_loss(row["metric"]))
            ]
            rows = summarize([*self._by_metric.get(metric, []), *causes], [reference, config], [metric])
            if len(rows) < 2:
                raise PageError(f"{self.source} has no {metric} of {config} and {reference}")
            self._others[key] = rows[-1]
        return self._others[key]

    def over_images(self, metric: str, config: str, reference: str) -> ImageInterval:
        """The interval over images of the differences of a configuration to a reference.

        Raises:
            PageError: there is none.
        """
        for each in self.images:
            if (each.metric, each.config, each.reference) == (metric, config, reference):
                return each
        raise PageError(f"{IMAGES} has no interval of {metric} of {config} to {reference}")

    def with_metric(self, name: str, of: Callable[..., float], *metrics: str) -> Comparison:
        """The same with a further metric, computed for each run of the last values of others."""
        rows = []
        for config in self.configs:
            first, *others = [self.by_seed(metric, config) for metric in metrics]
            for seed, value in first.items():
                made = of(value, *(each[seed] for each in others))
                rows.append({"config": config, "seed": seed, "step": 0, "metric": name, "value": made})
        changed = replace(self, rows=[*self.rows, *rows])
        changed.__dict__["summary"] = self.summary
        return changed

    @property
    def finished(self) -> list[CellRecord]:
        """The cells that are."""
        return [cell for cell in self.record.cells if cell.state == FINISHED]

    def ran_in(self) -> str:
        """The code and the machine of the finished cells: `commit 0123456789, AMD EPYC, 2 cores`."""
        known = [cell.environment for cell in self.finished if cell.environment >= 0]
        return by_machine([self.record.environments[place] for place in dict.fromkeys(known)])

    @property
    def remarks(self) -> dict[str, list[str]]:
        """What the summary lists below its tables, by title."""
        stopped = {(row["config"], row["seed"]) for row in self.rows if row["metric"] == STOPPED}
        pairs = [
            PairedCell(
                cell.variant, cell.seed, cell.initial_weights, cell.training_data, (cell.variant, cell.seed) in stopped
            )
            for cell in self.finished
        ]
        return {
            "Changed after cells had finished": [*self.record.changed],
            "Chosen": [*map(str, self.record.choices)],
            "Diverged": [f"{name} seed {seed}: {text}" for (name, seed), text in self._lost.items()],
            "Not paired": unpaired(pairs),
            "Environments": mixed_environments(self.record.environments),
            "Intervals": said_of(self.images),
            "Not finished": [
                f"{cell.variant} seed {cell.seed}" for cell in self.record.cells if cell.state != FINISHED
            ],
            "Not logged": not_logged(self.rows, self.record.metrics),
        }


def by_machine(environments: list[Environment]) -> str:
    """The code of runs, by the machine that they ran on."""
    codes: dict[str, dict[str, None]] = {}
    for each in environments:
        codes.setdefault(each.hardware, {})[f"commit {each.code}" if each.commit else each.code] = None
    return "; ".join(", ".join(filter(None, [in_turn(code), machine])) for machine, code in codes.items())


def read_comparison(folder: Path) -> Comparison:
    """The comparison in a folder.

    Raises:
        PageError: a file is missing or damaged, a value is there twice, or two files are of different cells.
        UsageError: `comparison.json` is damaged.
    """
    record = read_record(folder)
    if record is None:
        raise PageError(f"{folder} has no comparison.json: copy it with {RESULTS}")
    table = tables.read(folder / RESULTS)
    keys = ["config", "seed", "metric", "step"]
    if {*table.column_names} != {*keys, "value"}:
        raise PageError(f"{folder / RESULTS} has the columns {', '.join(table.column_names)}")
    if (count := table.group_by(keys).aggregate([("value", "count")]).num_rows) < table.num_rows:
        raise PageError(f"{folder / RESULTS} has {table.num_rows - count} values twice")
    images = tables.records(folder / IMAGES, ImageInterval) if (folder / IMAGES).is_file() else []
    rows = [row | {"value": math.nan if row["value"] is None else row["value"]} for row in table.to_pylist()]
    found = Comparison(record, with_stops(rows), images, folder / RESULTS)
    finished = {(cell.variant, cell.seed) for cell in found.finished}
    if apart := finished ^ {(row["config"], row["seed"]) for row in rows}:
        config, seed = min(apart)
        raise PageError(f"{folder}: {config} seed {seed} is in {RESULTS} or in comparison.json alone: copy both anew")
    return found
