"""The summary of a comparison: means, paired differences with their 95% interval, and what could have been seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_tasks.runs.divergence import diverged_cells
from lightning_tasks.runs.log import by_metric
from lightning_tasks.runs.safe_files import write_rows, written_whole


@dataclass(frozen=True)
class SummaryRow:
    """One metric of one configuration over its seeds; differences are to the configuration `reference`, seed by seed.

    `detectable` is the smallest true difference that a paired t-test at level 0.05 finds with probability 0.8, given
    the spread seen here. `difference` to `detectable` are nan where there is no reference or fewer than two seeds are
    paired, and where a value of a pair is not finite. `diverged` counts the seeds with such a value, or whose run
    diverged by its losses; `reference_diverged` those of the reference.
    """

    metric: str
    config: str
    seeds: int
    mean: float
    std: float
    reference: str = ""
    pairs: int = 0
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    detectable: float = math.nan
    diverged: int = 0
    reference_diverged: int = 0

    @property
    def verdict(self) -> str:
        """What the paired interval says, in a word or three; empty where nothing is paired and nothing diverged.

        An effect below `detectable` says "budget too small", and which way it points where the interval leaves 0 out.
        """
        if self.diverged:
            return "diverged"
        if self.pairs == 0:
            return ""
        if self.reference_diverged:
            return "reference diverged"
        if self.difference == self.detectable == 0.0:
            return "equal"
        side = "" if self.low <= 0.0 <= self.high else "lower" if self.difference < 0 else "higher"
        if abs(self.difference) < self.detectable:
            return f"{side}, but budget too small" if side else "budget too small"
        return side


def last_values(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, dict[int, float]]:
    """Value of `metric` at its last step, by configuration and seed."""
    last: dict[tuple[str, int], tuple[int, float]] = {}
    for row in rows:
        key = (row["config"], row["seed"])
        if row["metric"] == metric and row["step"] >= last.get(key, (-1, 0.0))[0]:
            last[key] = (row["step"], row["value"])
    values: dict[str, dict[int, float]] = {}
    for (config, seed), (_, value) in last.items():
        values.setdefault(config, {})[seed] = value
    return values


def paired_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t-interval of the mean of paired differences; two or more are needed."""
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    # `ttest_rel(...).confidence_interval()` is the same interval, and warns of equal differences, which are a result.
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def minimum_detectable_effect(std: float, pairs: int, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest true mean difference that a two-sided paired t-test finds with probability `power`.

    `std` is the standard deviation of the differences. The probability that the t statistic is beyond its critical
    value is a mean over quantiles of the estimated deviation (scipy's non-central t gives nan for two pairs).
    """
    if std == 0.0:
        return 0.0
    from scipy import optimize, stats

    degrees = pairs - 1
    nodes, weights = np.polynomial.legendre.leggauss(200)
    estimates = stats.chi.ppf((nodes + 1) / 2, degrees) / math.sqrt(degrees)
    limits = stats.t.ppf(1 - alpha / 2, degrees) * estimates

    def excess(shift: float) -> float:
        return float(weights @ (stats.norm.sf(limits - shift) + stats.norm.cdf(-limits - shift)) / 2 - power)

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-14)) * std / math.sqrt(pairs)


def summarize(
    rows: Sequence[dict[str, Any]],
    configs: Sequence[str],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]] | None = None,
) -> list[SummaryRow]:
    """A row for each metric that was logged, each configuration that has it, and each of its references.

    Those are `configs[0]` for all but itself, and then those that `references` has for the configuration.
    """
    summary = []
    diverged = diverged_cells(rows)
    logged = by_metric(rows)
    for metric in metrics:
        values = last_values(logged.get(metric, []), metric)
        bad = {
            config: sum(not math.isfinite(value) or (config, seed) in diverged for seed, value in of_seeds.items())
            for config, of_seeds in values.items()
        }
        for config in configs:
            if config in values:
                first = configs[0] if config != configs[0] else ""
                named = dict.fromkeys([first, *(references or {}).get(config, ())])
                for reference in named:
                    row = _summary_row(metric, config, values, reference)
                    summary.append(replace(row, diverged=bad[config], reference_diverged=bad.get(reference, 0)))
    return summary


def _summary_row(metric: str, config: str, values: Mapping[str, dict[int, float]], reference: str) -> SummaryRow:
    own, other = values[config], values.get(reference, {})
    std = _std(list(own.values()))
    row = SummaryRow(metric, config, len(own), float(np.mean(list(own.values()))), std, reference)
    differences = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    if len(differences) < 2:
        return row
    if not np.isfinite(differences).all():
        return replace(row, pairs=len(differences))
    low, high = paired_interval(differences)
    detectable = minimum_detectable_effect(float(np.std(differences, ddof=1)), len(differences))
    paired = {"pairs": len(differences), "difference": float(np.mean(differences)), "low": low, "high": high}
    return SummaryRow(**{**asdict(row), **paired, "detectable": detectable})


def _std(values: Sequence[float]) -> float:
    """The standard deviation over seeds; nan of one, and where one is not finite."""
    return float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else math.nan


HEADS = ("configuration", "seeds", "mean ± std", "compared with", "difference [95%]", "detectable", "verdict")
_TEX = {sign: f"\\{sign}" for sign in "&%$#_{}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$"}


def _cells(row: SummaryRow) -> list[str]:
    """A row of the tables, under `HEADS`."""
    difference = "" if row.pairs == 0 else f"{row.difference:+.4g} [{row.low:+.4g}, {row.high:+.4g}]"
    detectable = "" if row.pairs == 0 else f"{row.detectable:.3g}"
    mean = f"{row.mean:.5g}" + ("" if math.isnan(row.std) else f" ± {row.std:.2g}")
    seeds = f"{row.seeds}, {row.diverged} diverged" if row.diverged else str(row.seeds)
    return [row.config, seeds, mean, row.reference, difference, detectable, row.verdict]


def _by_metric(summary: Sequence[SummaryRow]) -> dict[str, list[SummaryRow]]:
    found: dict[str, list[SummaryRow]] = {}
    for row in summary:
        found.setdefault(row.metric, []).append(row)
    return found


def markdown(summary: Sequence[SummaryRow]) -> str:
    """The summary as Markdown, one table a metric."""
    lines: list[str] = []
    for metric, rows in _by_metric(summary).items():
        lines += [f"### {metric}", "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
        lines += [*(f"| {' | '.join(_cells(row))} |" for row in rows), ""]
    return "\n".join(lines)


def latex(summary: Sequence[SummaryRow]) -> str:
    """The same tables in LaTeX, for the package booktabs; special characters of names are escaped."""
    lines: list[str] = []
    for metric, rows in _by_metric(summary).items():
        lines += [r"\begin{tabular}{" + "l" * len(HEADS) + "}", r"\toprule"]
        lines += [rf"\multicolumn{{{len(HEADS)}}}{{l}}{{{_tex(metric)}}} \\", r"\midrule"]
        lines += [_tex_row(HEADS), r"\midrule", *(_tex_row(_cells(row)) for row in rows)]
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _tex_row(cells: Sequence[str]) -> str:
    return rf"{' & '.join(map(_tex, cells))} \\"


def _tex(text: str) -> str:
    """The text without what LaTeX takes for a command; a bracket at the beginning of a cell is none of `\\\\`."""
    plain = "".join(_TEX.get(sign, sign) for sign in " ".join(text.split()))
    return f"{{{plain}}}" if plain.startswith(("[", "*")) else plain


def write_summary(summary: Sequence[SummaryRow], remarks: Mapping[str, Sequence[str]], output: Path) -> str:
    """Write summary.csv, tables.tex, and summary.md, which ends with lists of `remarks` by title; return the latter."""
    write_rows(output / "summary.csv", [field.name for field in fields(SummaryRow)], map(asdict, summary))
    lists = [[f"{title}:", "", *(f"- {each}" for each in entries), ""] for title, entries in remarks.items() if entries]
    text = "\n".join([markdown(summary), *(line for lines in lists for line in lines)])
    with written_whole(output / "tables.tex") as path:
        path.write_text(latex(summary), encoding="utf-8")
    with written_whole(output / "summary.md") as path:
        path.write_text(text, encoding="utf-8")
    return text
