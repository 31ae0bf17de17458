"""What an expression in a page may say: each public method of `Folder` is a word, and gives a number or table.

`<!-- number diff("test/perplexity", "rpc", digits=2) -->` is of the comparison beside the page, and
`folder("lam").diff(...)` of one in a folder of it. Without a reference, it is the comparison's first configuration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from docs.pages import tables
from docs.pages.cell_tests import tested_comparison
from docs.pages.comparison import Comparison, read_comparison
from docs.pages.errors import PageError
from docs.pages.numbers import interval, least_to_most, markdown, mean_std, number, p_value, signed
from lightning_tasks.compare.choice import written
from lightning_tasks.compare.formats import OVER_IMAGES
from lightning_tasks.compare.summary import SummaryRow

Pair = Sequence[str]  # a metric, a configuration, and perhaps a reference
NOTHING = "no numbers yet"
OPPOSITE = {"lower": "higher", "higher": "lower"}


class Folder:
    """A folder of raw tables, and the words that tell of its comparison.

    Args:
        path: the folder.
        comparison: what the words tell of; by default the comparison in the folder.
    """

    def __init__(self, path: Path, comparison: Comparison | None = None) -> None:
        self.path, self._below = path, dict[str, Folder]()
        if comparison is not None:
            self.comparison = comparison

    @cached_property
    def comparison(self) -> Comparison:
        """The comparison in the folder."""
        return read_comparison(self.path)

    def folder(self, name: str) -> Folder:
        """A folder below this one."""
        return self._below.setdefault(name, Folder(self.path / name))

    def tests(self, name: str, test: str, primary: str = "", margin: float = 0.0, of: str = "") -> Folder:
        """What later tests of these checkpoints, or of page `of`'s, gave in `NAME.parquet`: a comparison of its own."""
        found = Folder(self.path.parent / of).comparison if of else self.comparison
        return Folder(self.path, tested_comparison(self.path / f"{name}.parquet", test, found, primary, margin))

    def since(self, seed: int) -> Folder:
        """The same of this seed and those after it."""
        rows = [row for row in self.comparison.rows if row["seed"] >= seed]
        return Folder(self.path, replace(self.comparison, rows=rows, images=[]))

    def and_seeds_of(self, other: Folder) -> Folder:
        """The same with the further seeds that some of its configurations have in another folder."""
        rows = [*self.comparison.rows, *other.comparison.rows]
        return Folder(self.path, replace(self.comparison, rows=rows, images=[]))

    def planned(self, comparisons: int) -> Folder:
        """The same, corrected for so many comparisons of each metric; 0 are those that were made."""
        record = replace(self.comparison.record, comparisons=comparisons)
        return Folder(self.path, replace(self.comparison, record=record))

    def earlier(self, both: bool = False) -> Folder:
        """The seeds that ran before, in `earlier.parquet`, or all seeds together."""
        now = self.comparison
        rows = tables.read(self.path / "earlier.parquet").to_pylist()
        before = [row | {"value": float(row["value"])} for row in rows]  # texts, where one has zeros at its end
        if twice := {row["seed"] for row in before} & {*now.seeds}:
            raise PageError(f"{self.path / 'earlier.parquet'} has seed {min(twice)}, which is one of the results too")
        return Folder(self.path, Comparison(now.record, [*before, *(now.rows if both else [])], [], now.source))

    def derived(self, name: str, formula: str, *metrics: str) -> Folder:
        """The same with a further metric: `difference` or `percent` (the first over the second, less 100)."""
        of = {"difference": lambda one, other: one - other, "percent": lambda one, other: 100 * (one / other - 1)}
        return Folder(self.path, self.comparison.with_metric(name, of[formula], *metrics))

    def _row(self, metric: str, config: str, reference: str = "") -> SummaryRow:
        return self.comparison.row(metric, config, reference or self.comparison.configs[0])

    # Numbers

    def mean(self, metric: str, config: str, digits: int = 1, scale: float = 1.0, step: int | None = None) -> str:
        """The mean over seeds of the last values, or of those of a step."""
        return number(float(self.comparison.values(metric, config, step).mean()) * scale, digits)

    def spread(self, metric: str, config: str, digits: int = 1, scale: float = 1.0) -> str:
        """The same with the standard deviation."""
        return mean_std(self.comparison.values(metric, config), digits, scale)

    def diff(self, metric: str, config: str, reference: str = "", digits: int = 1, scale: float = 1.0) -> str:
        """The paired difference with its 95% interval over seeds; "" where nothing is paired."""
        row = self._row(metric, config, reference)
        if row.pairs == 0:
            return ""
        return f"{signed(row.difference * scale, digits)} {interval(row.low, row.high, digits, scale)}"

    def told(self, metric: str, config: str, reference: str = "", digits: int = 1, scale: float = 1.0) -> str:
        """The same with its verdict."""
        return f"{self.diff(metric, config, reference, digits, scale)} ({self.verdict(metric, config, reference)})"

    def verdict(self, metric: str, config: str, reference: str = "") -> str:
        """What the paired differences say."""
        return self._row(metric, config, reference).verdict

    def images(self, metric: str, config: str, reference: str = "", digits: int = 1, scale: float = 100.0) -> str:
        """The interval over test images."""
        found = self.comparison.over_images(metric, config, reference or self.comparison.configs[0])
        return interval(found.low, found.high, digits, scale)

    def p(self, metric: str, config: str, reference: str = "") -> str:
        """The p-value, corrected for its family."""
        return p_value(self._row(metric, config, reference).corrected)

    def span(self, *pairs: Pair, digits: int = 1, scale: float = 1.0) -> str:
        """The least and the largest of differences."""
        return least_to_most((self._row(*pair).difference * scale for pair in pairs), digits, with_sign=True)

    def claim(self, claimed: str, *pairs: Pair) -> str:
        """Whether differences are as was claimed, "lower" or "higher", by the rules of docs/compare.md.

        Raises:
            PageError: nothing is paired.
        """
        verdicts = Counter(self.verdict(*pair) for pair in pairs)
        if "" in verdicts or not verdicts:
            raise PageError("a claim has a difference without a verdict: nothing is paired")
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        alike = {claimed: "holds here", OPPOSITE[claimed]: "the opposite here"}
        if len(verdicts) > 1:
            return f"mixed ({counted})"
        (verdict,) = verdicts
        return alike.get(verdict, verdict)

    def seeds(self) -> str:
        """How many there are, and which."""
        found = self.comparison.seeds
        return f"{len(found)} paired seeds ({found[0]} to {found[-1]})"

    def ran(self) -> str:
        """The code and the machine of the runs."""
        return self.comparison.ran_in()

    def hours(self, digits: int = 0) -> str:
        """What all runs took together."""
        return number(sum(cell.seconds for cell in self.comparison.finished) / 3600, digits)

    def chosen(self, config: str) -> str:
        """What was chosen for a configuration: `lr=0.001`."""
        for choice in self.comparison.record.choices:
            if choice.variant == config and choice.chosen >= 0:
                return written(choice.tried[choice.chosen].overrides)
        raise PageError(f"{self.path} has nothing that was chosen for {config}")

    # Tables

    def compared(self, metric: str, digits: int = 1, scale: float = 1.0, configs: Sequence[str] = ()) -> str:
        """One metric: each configuration, its differences, and what they say; a row for each reference."""
        over = {(each.config, each.reference): each for each in self.comparison.images if each.metric == metric}
        heads = ["configuration", "mean ± std", "compared with", "difference [95%]", *([OVER_IMAGES] if over else [])]
        rows = []
        for row in self.comparison.summary:
            if row.metric != metric or (configs and row.config not in configs):
                continue
            place = row.config, row.reference
            drawn = [interval(over[place].low, over[place].high, digits, scale) if place in over else ""]
            paired = [p_value(row.corrected), row.verdict] if row.pairs else ["", ""]
            difference = self.diff(metric, *place, digits, scale) if row.pairs else ""
            mean = self.spread(metric, row.config, digits, scale)
            rows.append([row.config, mean, row.reference, difference, *(drawn if over else []), *paired])
        return markdown([*heads, "p, corrected", "verdict"], rows)

    def course(self, metric: str, steps: Sequence[int], digits: int = 1, configs: Sequence[str] = ()) -> str:
        """The mean over seeds at some steps."""
        rows = [[name, *(self.mean(metric, name, digits, step=step) for step in steps)] for name in self._of(configs)]
        return markdown(["step", *map(str, steps)], rows)

    def _of(self, configs: Sequence[str]) -> Sequence[str]:
        return configs or self.comparison.configs

    def tried(self, digits: int = 1, scale: float = 1.0) -> str:
        """The values that were tried for each configuration and their scores; bold what was chosen."""
        rows = []
        for choice in self.comparison.record.choices:
            for place, each in enumerate(choice.tried):
                score = "diverged" if each.diverged else number(each.score * scale, digits)
                mark = "**" if place == choice.chosen else ""
                rows.append([choice.variant, f"{mark}`{written(each.overrides)}`{mark}", score])
        return markdown(["configuration", "tried", "score"], rows)

    def show(
        self, name: str, columns: Mapping[str, str], digits: int = 2, where: Mapping[str, str] | None = None
    ) -> str:
        """Columns of a raw table, by the names that the page gives them, and the rows that have some values.

        `a over b` is the ratio of two columns.
        """
        rows = self._rows(name, where or {})
        texts = [[_cell(row, key, digits) for key in columns] for row in rows or ()]
        return markdown([*columns.values()], [[NOTHING, *[""] * (len(columns) - 1)]] if rows is None else texts)

    def count(self, name: str, where: Mapping[str, str]) -> str:
        """How many rows of a raw table have some values."""
        rows = self._rows(name, where)
        return NOTHING if rows is None else str(len(rows))

    def _rows(self, name: str, where: Mapping[str, str]) -> list[dict[str, Any]] | None:
        path = self.path / f"{name}.parquet"
        if not path.is_file() and not path.with_suffix(".csv").is_file():
            return None
        return [row for row in tables.read(path).to_pylist() if where.items() <= row.items()]

    def column(self, name: str, key: str, digits: int = 1, scale: float = 1.0) -> str:
        """The least and the largest value of a column of a raw table; `a over b` is the ratio of two."""
        values = [value for row in self._rows(name, {}) or () if (value := _value(row, key)) is not None]
        return least_to_most((value * scale for value in values), digits) if values else NOTHING

    def fact(self, name: str, key: str, absent: str = NOTHING) -> str:
        """A value of a JSON file; `absent` where there is no such file."""
        path = self.path / f"{name}.json"
        return str(json.loads(path.read_text(encoding="utf-8"))[key]) if path.is_file() else absent


def _value(row: Mapping[str, Any], key: str) -> Any:
    of, _, to = key.partition(" over ")
    if not to:
        return row[key]
    return float(row[of]) / float(row[to]) if row.get(of) and float(row.get(to) or 0) else None


def _cell(row: Mapping[str, Any], key: str, digits: int) -> str:
    value = _value(row, key)
    return number(value, digits) if isinstance(value, float) else "" if value is None else str(value).replace("|", "/")
