"""`attnswap report`: runs and comparisons in one HTML page that needs no network."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import yaml

from lightning_tasks.compare.reading import Read
from lightning_tasks.compare.statistics import last_values
from lightning_tasks.compare.summary import SummaryRow
from lightning_tasks.errors import UsageError
from lightning_tasks.figures.curves import drawable, looks
from lightning_tasks.report.answer import answers
from lightning_tasks.report.arguments import parser
from lightning_tasks.report.groups import read_all
from lightning_tasks.report.svg import curves_svg, forest_svg, heat_map, heat_svg, layer_metrics
from lightning_tasks.runs.divergence import SKIPPED, STOPPED, diverged_cells, diverged_configs, with_stops
from lightning_tasks.runs.log import by_metric
from lightning_tasks.runs.metric_names import MetricName
from lightning_tasks.runs.robustness import GIVES_NAN, figure
from lightning_tasks.runs.run import Run
from lightning_tasks.runs.safe_files import written_whole
from lightning_tasks.runs.settings import differences, swapped

TEMPLATE = "page.html.j2"
MOST_CURVES = 100  # of a page, each of which takes a good part of a second
_FIRST = ("loss", "perplexity", "top1", "accuracy", "miou")  # what is looked for first


def order(metrics: Sequence[str]) -> list[str]:
    """Metrics as the page shows them: validation, test and training scores before what monitors logged."""
    stages = ("val", "test", "train", "")

    def place(metric: str) -> tuple[int, int, str]:
        name = MetricName.parse(metric)
        depth = name.family.count("/") + bool(name.line)
        score = _FIRST.index(name.family) if name.family in _FIRST and not name.line else len(_FIRST) + depth
        return stages.index(name.stage) + 10 * (depth > 0), score, metric

    return sorted(metrics, key=place)


def is_test(run: Run) -> bool:
    """Whether a run is a test of a checkpoint: it logged nothing of a training or a validation."""
    names = [MetricName.parse(row["metric"]) for row in run.rows]
    return bool(names) and all(name.stage == "test" or name.is_robustness for name in names)


def is_monitored(metric: str) -> bool:
    """Whether monitors logged it, and it is no score: it has a slash beside that of its stage."""
    name = MetricName.parse(metric)
    return bool(name.line) or "/" in name.family


def mean_and_std(values: Sequence[float]) -> str:
    """ "0.913 ± 0.004" of several seeds, "0.913" of one; infinite and nan values say "not finite"."""
    if not all(math.isfinite(value) for value in values):
        return "not finite"
    spread = f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{spread}"


def final_table(
    rows: Sequence[dict[str, Any]],
    configs: Sequence[str],
    metrics: Sequence[str],
    diverged: Container[tuple[str, int]] = (),
) -> list[Any]:
    """For each metric its name and, for each configuration, the last value over its seeds, and how many they are.

    That of a run that diverged (configuration and seed) is NaN, as a score of its network would be a number; what the
    guard logged of it stays.
    """
    table, logged = [], by_metric(rows)
    for metric in metrics:
        last = last_values(logged.get(metric, []), metric)
        lost = () if metric in (STOPPED, SKIPPED) else diverged
        cells = [
            [math.nan if (config, seed) in lost else value for seed, value in last.get(config, {}).items()]
            for config in configs
        ]
        table.append((metric, [(mean_and_std(cell), len(cell)) if cell else None for cell in cells]))
    return table


def robustness_table(
    runs: Sequence[Run], configs: Sequence[str], diverged: Container[tuple[str, int]] = ()
) -> list[Any]:
    """For each line of the robustness tables its name and, for each configuration, the mean over seeds.

    What was measured of a run that diverged is NaN, as in :func:`final_table`.
    """
    values: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for run in runs:
        for row in run.robustness:
            key = (row.test, row.name, row.setting, row.metric)
            if row.is_measured and (run.config, run.seed) in diverged:
                row = replace(row, value=math.nan, note=GIVES_NAN)
            values.setdefault(key, {}).setdefault(run.config, []).append(row)
    return [
        (key, [_robust(found[config]) if config in found else "" for config in configs])
        for key, found in values.items()
    ]


def robustness_notes(runs: Sequence[Run], configs: Sequence[str]) -> list[str]:
    """Of each line of the table whose cells were measured on other images, or with other notes: what each is of."""
    found: dict[str, dict[str, set[str]]] = {}
    for run in runs:
        for row in run.robustness:
            line = ", ".join(filter(None, (row.test, row.name, row.setting, row.metric)))
            found.setdefault(line, {}).setdefault(run.config, set()).add(_measured_on(row))
    return [
        f"{line}: " + "; ".join(f"{config}: {' and '.join(sorted(of[config]))}" for config in configs if config in of)
        for line, of in found.items()
        if len(set[str]().union(*of.values())) > 1
    ]


def _measured_on(row: Any) -> str:
    note = row.note if row.test in ("mean corruption", "shift", "out of distribution") else ""  # which say of what
    return f"{row.samples:,} samples" + (f", {note}" if note else "")


def _robust(rows: Sequence[Any]) -> str:
    values = [row.value for row in rows]
    for row in rows:
        if math.isnan(row.value):
            return figure(row)
    if not np.isfinite(values).all():
        return "inf" if rows[0].metric == "median_l2" else "not finite"
    if len({_measured_on(row) for row in rows}) > 1:
        return "of several sets"
    text = figure(replace(rows[0], value=float(np.mean(values))))
    if len(values) == 1:
        return text
    return f"{text} ± {figure(replace(rows[0], value=float(np.std(values, ddof=1)))).removesuffix('%')}"


def heat_maps(rows: Sequence[dict[str, Any]], configs: Sequence[str]) -> list[Any]:
    """For each of the first names that monitors logged by layer, a heat map per configuration, in one scale."""
    found, logged = [], by_metric(rows)
    for name, metrics in islice(layer_metrics(sorted(logged)).items(), MOST_CURVES):
        of_these = [row for metric in metrics for row in logged[metric]]
        values = drawable([row["value"] for row in of_these])
        limits = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 1.0)
        maps = []
        for config in configs:
            steps, values = heat_map([row for row in of_these if row["config"] == config], metrics)
            if steps:
                maps.append((config, heat_svg(steps, values, metrics, limits, f"{name} {config}")))
        found.append((name, maps))
    return found


def drawable_rows(summary: Sequence[SummaryRow]) -> dict[str, list[SummaryRow]]:
    """By metric, the rows whose difference and interval are numbers that an axis takes."""
    found: dict[str, list[SummaryRow]] = {}
    for row in summary:
        if row.pairs and np.isfinite(drawable([row.difference, row.low, row.high])).all():
            found.setdefault(row.metric, []).append(row)
    return dict(islice(found.items(), MOST_CURVES))


def _tables(
    rows: Sequence[dict[str, Any]],
    fitted: Sequence[str],
    tested: Sequence[str],
    metrics: Sequence[str],
    diverged: Container[tuple[str, int]],
) -> list[Any]:
    """Title, configurations, rows of scores and rows of monitors, of fits and of tests of checkpoints apart."""
    found = []
    for title, configs in (("Last values", fitted), ("Tests of checkpoints", tested)):
        table = [row for row in final_table(rows, configs, metrics, diverged) if any(row[1])]
        scores = [row for row in table if not is_monitored(row[0])]
        if table:
            found.append((title, configs, scores, [row for row in table if row not in scores]))
    return found


def _data(settings: Mapping[str, dict[str, Any] | None]) -> list[str]:
    """The data sets of the configurations, by the names of their classes."""
    data = [each.get("data") for each in settings.values() if each]
    names = [str(each.get("class_path", "")).rpartition(".")[2] for each in data if isinstance(each, Mapping)]
    return [f"data {' and '.join(dict.fromkeys(filter(None, names)))}"] if any(names) else []


def _explorers(run: Run, beside: Path) -> list[tuple[str, str]]:
    """The pages of `attnswap explore` in a run's folder: their names, and their addresses from the page's folder."""
    pages = sorted(run.folder.glob("explore*.html"))
    return [(each.name, quote(os.path.relpath(each.resolve(), beside.resolve()))) for each in pages if each.is_file()]


def page(read: Read, beside: Path = Path()) -> str:
    """The HTML page, whose links start at the folder `beside`; whatever comes from runs is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    configs, as_logged = read.configs, read.rows()
    summary = sorted(read.summary, key=lambda row: not row.primary)  # what decides comes first
    tested = list(dict.fromkeys(run.config for run in read.runs if is_test(run)))
    fitted = [config for config in configs if config not in tested]
    diverged, rows = diverged_cells(as_logged), with_stops(as_logged)
    settings: dict[str, dict[str, Any] | None] = dict.fromkeys(configs)
    for run in read.runs:
        settings[run.config] = settings[run.config] or run.settings  # the first seed's that are known
    steps: dict[str, set[int]] = {}
    for row in rows:
        steps.setdefault(row["metric"], set()).add(row["step"])
    names = {metric: MetricName.parse(metric) for metric in steps}
    plain = order([metric for metric, name in names.items() if name.layer is None and not name.is_robustness])
    logged, curves = by_metric(rows), [metric for metric in plain if len(steps[metric]) > 1]
    notes = [*read.notes, *(f"{name} seed {seed} diverged: {text}" for (name, seed), text in diverged.items())]
    if len(curves) > MOST_CURVES:
        notes.append(f"drawn are the first {MOST_CURVES} curves of {len(curves)}; the table has the last values of all")
    if (monitored := len(layer_metrics(sorted(logged)))) > MOST_CURVES:
        notes.append(f"drawn are the first {MOST_CURVES} of the {monitored} names that monitors logged by layer")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = "{:.4g}".format
    return environment.get_template(TEMPLATE).render(
        configs=list(zip(configs, looks(len(configs)), strict=True)),
        remarks=diverged_configs(as_logged),
        runs=[(run, _explorers(run, beside)) for run in read.runs],
        notes=notes,
        swapped=[(config, swapped(each)) for config, each in settings.items()],
        unknown=[config for config, each in settings.items() if each is None],
        differences=differences(settings),
        answers=answers(read.summary),
        facts=[datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"), *read.origins, *_data(settings)],
        finals=_tables(rows, fitted, tested, plain, diverged),
        summary=summary,
        forest=[(metric, Markup(forest_svg(rows, metric))) for metric, rows in drawable_rows(summary).items()],
        curves=[
            (metric, is_monitored(metric), Markup(curves_svg(logged[metric], configs, metric)))
            for metric in curves[:MOST_CURVES]
        ],
        heat_maps=[(name, [(config, Markup(svg)) for config, svg in maps]) for name, maps in heat_maps(rows, configs)],
        robustness=robustness_table(read.runs, configs, diverged),
        robustness_notes=robustness_notes(read.runs, configs),
        settings=[
            (config, yaml.safe_dump(each, sort_keys=False)) for config, each in settings.items() if each is not None
        ],
    )


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap report` with these arguments.

    Raises:
        UsageError: a folder that cannot be read, or an output that is a folder or lies in none.
        SystemExit: arguments that the parser refuses.
    """
    options = parser().parse_args(list(arguments))
    if options.output.is_dir():
        raise UsageError(f"--output {options.output} is a folder: give a file, as {options.output / 'report.html'}")
    if not options.output.parent.is_dir():
        raise UsageError(f"--output {options.output}: give a file in a folder that is there")
    text = page(read_all(options.runs), options.output.parent)
    with written_whole(options.output) as path:  # names of folders and texts in YAML may be no Unicode
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(f"report: {options.output}")
