"""A table as the pages have it, and those that several pages have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from docs.pages.errors import PageError
from docs.pages.numbers import difference, interval, mean_std, number
from docs.pages.raw import Comparison
from lightning_tasks.compare.choice import Choice, written
from lightning_tasks.compare.formats import OVER_IMAGES
from lightning_tasks.compare.summary import SummaryRow

NOTHING = "no numbers yet"
Columns = Mapping[str, tuple[str, Mapping[int, int], Callable[[float], str]]]


@dataclass(frozen=True)
class Table:
    """A table in Markdown.

    Args:
        heads: one for each column.
        rows: cells of text.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [_line(self.heads), "|---" * len(self.heads) + "|", *map(_line, self.rows)]
        return "\n".join(lines)


def nothing_yet(*heads: str) -> Table:
    """A table before there are runs to fill it."""
    return Table(heads, [[NOTHING, *[""] * (len(heads) - 1)]])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table in Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def means(
    comparison: Comparison, names: Mapping[str, str], metrics: Mapping[str, tuple[str, int, float, bool]]
) -> Table:
    """Last values over seeds: a row for each configuration of `names`, a column for each head of `metrics`.

    Args:
        comparison: where the values are from.
        names: what the page calls a configuration.
        metrics: by head: the metric, digits, scale, and whether the deviation over seeds is shown too.
    """

    def cell(config: str, metric: str, digits: int, scale: float, spread: bool) -> str:
        values = comparison.values(metric, config)
        return mean_std(values if spread else [values.mean()], digits, scale)

    rows = [[name, *(cell(config, *how) for how in metrics.values())] for config, name in names.items()]
    return Table(["configuration", *metrics], rows)


def styled(text: str, row: SummaryRow) -> str:
    """Bold where the verdict is lower or higher, italic where it is one of these before the correction only."""
    mark = "**" if row.verdict in ("lower", "higher") else "*" if "not after correction" in row.verdict else ""
    return f"{mark}{text}{mark}"


def differences(
    comparison: Comparison,
    head: str,
    pairs: Mapping[str, tuple[str, str]],
    metrics: Mapping[str, tuple[str, int, float]],
) -> Table:
    """Paired differences: a row for each metric, a column for each pair of configurations.

    A metric that is none of the comparison's has no verdict, and no style.
    """

    def cell(metric: str, digits: int, scale: float, config: str, reference: str) -> str:
        row = comparison.row(metric, config, reference)
        text = f"{difference(row, digits, scale)} ({number(row.detectable * scale, digits)})"
        return styled(text, row) if metric in comparison.metrics else text

    rows = [[name, *(cell(*how, *pair) for pair in pairs.values())] for name, how in metrics.items()]
    return Table([head, *pairs], rows)


def verdicts(
    comparison: Comparison, metric: str, names: Mapping[str, str], digits: int, scale: float = 1.0, seeds: bool = False
) -> Table:
    """One metric of the comparison: each configuration, its differences and what they say, and its seeds if asked.

    Intervals over images have a column where there are any.
    """
    images = {(each.config, each.reference): each for each in comparison.images if each.metric == metric}
    heads = ["compared with", "difference [95%]", *([OVER_IMAGES] if images else []), "p, corrected", "detectable"]
    rows = []
    for row in comparison.summary:
        if row.metric == metric and row.config in names:
            count = [str(row.seeds)] if seeds else []
            values = mean_std(comparison.values(metric, row.config), digits, scale)
            over = images.get((row.config, row.reference))
            drawn = [interval(over.low, over.high, digits, scale) if over else ""] if images else []
            paired = ["", *drawn, "", ""]
            if row.pairs:
                detectable = number(row.detectable * scale, digits)
                paired = [difference(row, digits, scale), *drawn, p_value(row.corrected), detectable]
            rows.append([names[row.config], *count, values, names.get(row.reference, ""), *paired, row.verdict])
    return Table(["configuration", *(["seeds"] if seeds else []), "mean ± std", *heads, "verdict"], rows)


def over_steps(
    comparison: Comparison,
    names: Mapping[str, str],
    columns: Columns,
) -> Table:
    """Means over seeds: a row for each configuration of `names`, and for each head of `columns` a column for each step.

    Args:
        comparison: where the values are from.
        names: what the page calls a configuration.
        columns: by head: the metric, at which step each shown one was logged, and how a value is written.
    """
    heads = [text for head, (_, steps, _) in columns.items() for text in (head, *[""] * (len(steps) - 1))]
    rows = [["*step*", *(str(step) for _, steps, _ in columns.values() for step in steps)]]
    for config, name in names.items():
        cells = [
            write(comparison.mean(metric, config, logged))
            for metric, steps, write in columns.values()
            for logged in steps.values()
        ]
        rows.append([name, *cells])
    return Table(["configuration", *heads], rows)


def chosen_values(choices: Sequence[Choice], names: Mapping[str, str], digits: int) -> Table:
    """What was tried for each configuration, and its score: a row for each value, bold what was chosen."""
    rows = []
    for choice in choices:
        scores = _scores(choice, digits)
        for place, (each, score) in enumerate(zip(choice.tried, scores, strict=True)):
            name = names[choice.variant] if place == 0 else ""
            rows.append([name, _bold(f"`{written(each.overrides)}`", place == choice.chosen), score])
    return Table(["configuration", "tried", choices[0].metric], rows)


def tried_values(
    choices: Sequence[Choice], head: str, names: Mapping[str, str] | None = None, digits: int = 1, scale: float = 1.0
) -> Table:
    """The score of each value where all configurations were tried with the same: a column for each, bold the chosen.

    Raises:
        PageError: they were tried with several, or with more than one setting at once.
    """
    asked = {choice.variant: [each.overrides for each in choice.tried] for choice in choices}
    common = next(iter(asked.values()), [])
    for variant, each in asked.items():
        if each != common or any(len(overrides) != 1 for overrides in each):
            raise PageError(f"{variant} was tried with {each}; a table has one setting, with the same values for all")
    heads = [overrides[0].partition("=")[2] for overrides in common]
    rows = [[(names or {}).get(each.variant, each.variant), *_scores(each, digits, scale)] for each in choices]
    return Table([head, *heads], rows)


def _scores(choice: Choice, digits: int, scale: float = 1.0) -> list[str]:
    texts = [
        "diverged" if each.diverged or math.isnan(each.score) else number(each.score * scale, digits)
        for each in choice.tried
    ]
    return [_bold(text, place == choice.chosen) for place, text in enumerate(texts)]


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def p_value(value: float) -> str:
    """Three digits behind the point, or that it is less."""
    return "< 0.001" if value < 0.001 else number(value, 3)


def step_costs(rows: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> Table:
    """What a training step takes, as the benchmark measured it."""
    found = {row["variant"]: row for row in rows}
    first = found[next(iter(names))]
    time = [found[config]["to the first"] for config in names]
    memory = [found[config]["peak memory of a step"].removesuffix(" MiB") for config in names]
    return Table(
        ["", *names.values()],
        [
            [f"time to {next(iter(names.values()))}'s {first['CPU time per step']}", *time],
            ["peak of resident memory, MiB", *memory],
        ],
    )


def paired_verdicts(
    comparison: Comparison, head: str, pairs: Mapping[str, tuple[str, str]], metric: str, digits: int
) -> Table:
    """The paired differences of one metric of the comparison: a row for each pair of configurations."""
    rows = []
    for name, pair in pairs.items():
        row = comparison.row(metric, *pair)
        detectable = number(row.detectable, digits)
        rows.append([name, difference(row, digits), p_value(row.corrected), detectable, row.verdict])
    return Table([head, "mean [95%]", "p, corrected", "detectable", "verdict"], rows)
