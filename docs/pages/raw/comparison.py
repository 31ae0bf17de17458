"""The values of a comparison that a page tells of, its summary and its intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from docs.pages.errors import PageError
from docs.pages.numbers import in_turn
from lightning_tasks.compare.choice import NOTHING, Choice, written
from lightning_tasks.compare.formats import IMAGES, said_of
from lightning_tasks.compare.statistics import last_values
from lightning_tasks.compare.summary import (
    Endpoints,
    ImageInterval,
    PairedCell,
    SummaryRow,
    not_logged,
    summarize,
    unpaired,
)
from lightning_tasks.runs.divergence import STOPPED, Row, diverged_cells, is_loss
from lightning_tasks.runs.environment import Environment, mixed_environments
from lightning_tasks.runs.log import by_metric

COMPARISON, RESULTS = "comparison.json", "results.csv"
FINISHED = "finished"  # a cell's state


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
            "Changed after cells had finished": list(self.endpoints.changed),
            "Chosen": list(map(str, self.choices)),
            "Diverged": [f"{name} seed {seed}: {text}" for (name, seed), text in diverged_cells(self.rows).items()],
            "Not paired": unpaired(paired),
            "Environments": mixed_environments(self.environments),
            "Intervals": said_of(self.images),
            "Not finished": [f"{each['variant']} seed {each['seed']}" for each in self.cells if each not in finished],
            "Not logged": not_logged(self.rows, self.metrics),
        }

    @cached_property
    def _by_metric(self) -> dict[str, list[Row]]:
        return by_metric(self.rows)

    @cached_property
    def _lost(self) -> dict[tuple[str, int], str]:
        return diverged_cells(self.rows)

    @cached_property
    def _causes(self) -> list[Row]:
        """The rows that say of these runs that they diverged."""
        return [
            row
            for row in self.rows
            if (row["config"], row["seed"]) in self._lost and (row["metric"] == STOPPED or is_loss(row["metric"]))
        ]

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
        """The same by seed, in their order; the last value of a run that diverged is NaN.

        Raises:
            PageError: no such value was logged.
        """
        rows = [row for row in self._by_metric.get(metric, ()) if step is None or row["step"] == step]
        found = last_values(rows, metric).get(config)
        if not found:
            place = "" if step is None else f" at step {step}"
            raise PageError(f"{RESULTS} has no {metric} of {config}{place}")
        lost = [] if step is not None else [seed for seed in found if (config, seed) in self._lost]
        return dict(sorted((found | dict.fromkeys(lost, math.nan)).items()))

    def has(self, metric: str, config: str) -> bool:
        """Whether any run of the configuration logged it."""
        return any(row["config"] == config for row in self._by_metric.get(metric, ()))

    def mean(self, metric: str, config: str, step: int | None = None) -> float:
        """The mean of these over seeds."""
        return float(self.values(metric, config, step).mean())

    def below(self, metric: str, config: str, reference: str) -> str:
        """In how many of the seeds that both have is a configuration below a reference, as `15 of 16`."""
        values, others = self.by_seed(metric, config), self.by_seed(metric, reference)
        both = values.keys() & others.keys()
        return f"{sum(values[seed] < others[seed] for seed in both)} of {len(both)}"

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
            rows = summarize([*self._by_metric.get(metric, []), *self._causes], [reference, config], [metric])
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
        for cell in self._finished(*configs):
            taken = cell.get("seconds")
            if not isinstance(taken, (int, float)) or not math.isfinite(taken):
                raise PageError(f"{COMPARISON} has {taken!r} as the seconds of {cell['variant']} {cell['seed']}")
            found.append(float(taken))
        return found

    def ran_in(self, *configs: str) -> str:
        """The code and the machine of the finished cells, of these configurations, or of all.

        As `commit 0123456789, AMD EPYC, 2 cores`; what ran on several machines is told apart.

        Raises:
            PageError: it was not kept.
        """
        found = []
        for cell in self._finished(*configs):
            place = cell.get("environment", -1)
            if type(place) is not int or not 0 <= place < len(self.environments):
                raise PageError(f"{COMPARISON} has no environment of {cell['variant']} {cell['seed']}")
            found.append(self.environments[place])
        return by_machine(found)

    def _finished(self, *configs: str) -> list[Mapping[str, Any]]:
        """The finished cells of these configurations, or of all."""
        of = configs or self.configs
        if found := [cell for cell in self.cells if cell["state"] == FINISHED and cell["variant"] in of]:
            return found
        raise PageError(f"{COMPARISON} has no finished cell of {', '.join(of)}")

    def with_loss(self, name: str, clean: str, left: str) -> Comparison:
        """The same with what is lost from a score on clean samples to another one."""
        return self.with_metric(name, lambda before, after: before - after, clean, left)

    def with_metric(self, name: str, of: Callable[..., float], *metrics: str) -> Comparison:
        """The same with a further metric, computed for each run of the last values of others."""
        rows = []
        for config in self.configs:
            first, *others = [self.by_seed(metric, config) for metric in metrics]
            for seed, value in first.items():
                made_of = of(value, *(each[seed] for each in others))
                rows.append({"config": config, "seed": seed, "step": 0, "metric": name, "value": made_of})
        made = replace(self, rows=[*self.rows, *rows])
        made.__dict__["summary"] = self.summary
        return made


def by_machine(environments: Sequence[Environment]) -> str:
    """The code of runs, by the machine that they ran on: `commit 0123456789, AMD EPYC, 2 cores`."""
    codes: dict[str, dict[str, None]] = {}
    for each in environments:
        codes.setdefault(each.hardware, {})[f"commit {each.code}" if each.commit else each.code] = None
    return "; ".join(", ".join(filter(None, [in_turn(found), machine])) for machine, found in codes.items())
