"""`attnswap compare`: configurations x seeds, paired by seed, resumable, into one long table and one summary."""

from __future__ import annotations

import argparse
import contextlib
import csv
import difflib
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from attention_modules.mechanism import did_you_mean
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.statistics import SummaryRow, summarise, write_summary
from lightning_tasks.compare.workers import run_cells
from lightning_tasks.errors import UsageError, reason, refusal_in
from lightning_tasks.figures.curves import draw_comparison
from lightning_tasks.recipes import find_recipe, read_settings, recipe_name
from lightning_tasks.runs.divergence import diverged_cells, diverged_configs, with_stops
from lightning_tasks.runs.folder import make_output_folder
from lightning_tasks.runs.safe_files import written_whole

RESULTS = "results.csv"
LOCK = ".compare.lock"
MAX_SEEDS = 10_000
RESULT_COLUMNS = ("config", "seed", "step", "metric", "value")
KEYS = {"base", "variants", "settings", "test", "metrics", "references"}
FILE_FORM = """\
a comparison file:
  base: RECIPE                              what every variant starts from
  variants: {NAME: {KEY: VALUE}}            what each changes, spelled as on the command line without the dashes
  settings: {KEY: VALUE}                    for all variants
  references: {NAME: [OTHER, ...]}          differences of NAME to each OTHER too, beside those to the first variant
  test: true                                test each model after its fit
  metrics: [METRIC]                         of the summary
"""
METRICS = (
    "val/perplexity",
    "val/loss",
    "val/attention/entropy/mean",
    "qk_spectrum/variance/layer_00",
    "qk_spectrum/scale/layer_00",
)


@dataclass(frozen=True)
class Variant:
    """One configuration of a comparison: a name, the file it starts from, and what the command line adds to it."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    test: bool = False


def parse_seeds(text: str) -> list[int]:
    """Seeds from "0:8" (0 to 7) or "0,3,5".

    Raises:
        UsageError: `text` is neither form, or names no seed.
    """
    try:
        if ":" in text:
            start, stop = (int(part) for part in text.split(":"))
            seeds: Sequence[int] = range(start, stop)
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds {text!r} is neither a range such as 0:8 nor a list such as 0,3,5") from error
    if seeds and (seeds[-1] - seeds[0] >= MAX_SEEDS if isinstance(seeds, range) else len(seeds) > MAX_SEEDS):
        raise UsageError(f"--seeds {text!r} names more than {MAX_SEEDS} seeds; compare fewer")
    seeds = list(seeds)
    if strange := [seed for seed in seeds if not 0 <= seed < 1 << 32]:
        raise UsageError(f"--seeds {text!r}: {strange[0]} is none; a seed is at least 0 and below 2**32")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text!r} must name at least one seed, and none twice")
    return seeds


def override_arguments(overrides: dict[str, Any]) -> tuple[str, ...]:
    """Overrides as the command line spells them: {"trainer.callbacks+": {...}} -> "--trainer.callbacks+={...}"."""
    return tuple(
        f"--{key}={value if isinstance(value, str) else _yaml_of(json.dumps(value))}"
        for key, value in overrides.items()
    )


def _yaml_of(text: str) -> str:
    """JSON as YAML reads it: the two differ in infinity and nan, which are also words that a string may hold."""
    words = {"Infinity": ".inf", "NaN": ".nan"}
    return re.sub(r'"(?:[^"\\]|\\.)*"|Infinity|NaN', lambda found: words.get(found[0], found[0]), text)


def read_variants(name: str) -> list[Variant]:
    """The configurations that one CONFIG of the command stands for.

    A recipe stands for itself. A file with the keys `base` and `variants` stands for one configuration a variant,
    each the base with the overrides listed, spelled as on the command line without the two dashes. Those under
    `settings` are for every variant; `test: true` tests each model after its fit; `metrics` are those of the summary,
    and `references` the variants whose difference to others than the first one stands there too.

    Raises:
        UsageError: no such file, a comparison file of another shape, or a reference that is no variant of the file.
    """
    path = find_recipe(name)
    content = read_settings(path)
    if "variants" not in content:
        return [Variant(recipe_name(path), str(path))]
    variants, settings, test = content["variants"], content.get("settings", {}), content.get("test", False)
    metrics = content.get("metrics", [])
    if (
        not {"base", "variants"} <= set(content) <= KEYS
        or not (isinstance(variants, dict) and variants and isinstance(settings, dict))
        or not all(value is None or isinstance(value, dict) for value in variants.values())
        or not isinstance(test, bool)
        or not (isinstance(metrics, list) and all(isinstance(metric, str) for metric in metrics))
    ):
        raise UsageError(
            f"{path}: a comparison has the keys `base` and `variants: {{name: {{setting: value}}}}`, and may have "
            "`settings: {setting: value}` for all variants, `test: true` to test each model after its fit, "
            "`metrics: [name]`, and `references: {name: [name]}`"
        )
    check_references(path, content.get("references", {}), [str(key) for key in variants])
    base = str(find_recipe(str(content["base"])))
    if "variants" in read_settings(Path(base)):
        raise UsageError(f"{path}: its base {content['base']!r} is a comparison; give a recipe that can be fitted")
    try:
        shared = override_arguments(settings)
        found = [
            Variant(str(key), base, (*shared, *override_arguments(value or {})), test)
            for key, value in variants.items()
        ]
        "".join(text for variant in found for text in (variant.name, *variant.overrides)).encode()
    except (TypeError, UnicodeEncodeError) as error:  # a date, a set, bytes, half of a surrogate pair
        raise UsageError(f"{path}: a name or value is no plain data ({error}); put it into quotes") from error
    return found


def check_references(path: Path, references: Any, variants: Sequence[str]) -> None:
    """Check that `references` names, for some of the `variants` of the file at `path`, lists of others of them.

    Raises:
        UsageError: it has another shape, a name that is no variant (the nearest is given), or one twice.
    """
    if not isinstance(references, dict) or not all(isinstance(others, list) for others in references.values()):
        raise UsageError(f"{path}: `references` must be `{{name: [other names]}}`, got {references!r}")
    for name, others in references.items():
        for given in map(str, (name, *others)):
            if given not in variants:
                near = difflib.get_close_matches(given, variants, n=3, cutoff=0.4)
                hint = f"the nearest are {', '.join(near)}" if near else f"they are {', '.join(variants)}"
                raise UsageError(f"{path}: `references` has {given!r}, which is none of the variants; {hint}")
        if len({str(name), *map(str, others)}) <= len(others):
            raise UsageError(f"{path}: `references` of {name!r} must be other variants, each once, got {others}")


def summary_references(names: Sequence[str]) -> dict[str, list[str]]:
    """The references that comparison files ask for, by variant."""
    asked = [read_settings(find_recipe(name)).get("references", {}) for name in names]
    return {str(name): [str(other) for other in others] for each in asked for name, others in each.items()}


def summary_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that comparison files ask for, or those of the language models where none does."""
    asked = [metric for name in names for metric in read_settings(find_recipe(name)).get("metrics", ())]
    return list(dict.fromkeys(asked)) or list(METRICS)


def plan_cells(
    variants: Sequence[Variant], seeds: Sequence[int], output: Path, extra: Sequence[str] = (), comparison: str = ""
) -> list[Cell]:
    """Every cell of the comparison of that name, seed by seed, so that an interrupted run leaves complete pairs.

    Raises:
        UsageError: two configurations have one name, or names of one folder.
    """
    cells = [
        Cell(variant.name, variant.config, (*variant.overrides, *extra), seed, str(output), variant.test, comparison)
        for seed in seeds
        for variant in variants
    ]
    if len({cell.folder for cell in cells}) < len(cells):
        names = ", ".join(variant.name for variant in variants)
        raise UsageError(f"configurations must have different names, also with _ for other signs, got {names}")
    return cells


def check_cells(cells: Iterable[Cell]) -> None:
    """Parse what the cells of each configuration ask for and build its module, before the first of them runs.

    Raises:
        UsageError: some of them are refused, or cannot be built.
    """
    from lightning_tasks.cli.fit import check_arguments
    from lightning_tasks.runs.wandb_runs import check_cell_loggers

    refused = {}
    for cell in {cell.name: cell for cell in cells}.values():
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                check_cell_loggers(check_arguments(cell.arguments))
        except Exception as error:
            refusal = error if isinstance(error, UsageError) else refusal_in(error)
            refused[cell.name] = reason(error) if refusal is None else str(refusal)
    if refused:
        lines = "".join(f"\n{name}: {text}" for name, text in refused.items())
        raise UsageError(f"nothing was run, as configurations are refused: {', '.join(refused)}{lines}")


def collect_results(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """The rows of every finished cell: config, seed, step, metric, value."""
    return [
        {"config": cell.name, "seed": cell.seed, **row}
        for cell in cells
        if cell.is_finished()
        for row in cell.result()["rows"]
    ]


def write_results(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the long table, whole or not at all."""
    with written_whole(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, RESULT_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def unpaired_seeds(cells: Iterable[Cell]) -> list[str]:
    """What breaks the pairing: a sentence for each cell whose weights or data differ from those of its seed's first."""
    finished = [cell for cell in cells if cell.is_finished()]
    first: dict[int, Cell] = {}
    for cell in finished:
        first.setdefault(cell.seed, cell)
    return [
        f"{cell.label}: {what.replace('_', ' ')} differ from those of {first[cell.seed].name}"
        for cell in finished
        for what in ("initial_weights", "training_data")
        if cell.result()[what] != first[cell.seed].result()[what]
        and not (what == "training_data" and is_cut_short(cell, first[cell.seed]))
    ]


def is_cut_short(*cells: Cell) -> bool:
    """Whether a guard stopped one of the finished cells, which saw the beginning of the data only."""
    return any(cell.result().get("stopped") for cell in cells)


def write_curves(rows: Sequence[dict[str, Any]], names: Sequence[str], metrics: Sequence[str], picture: Path) -> None:
    """Draw the metrics over the steps into a PNG file, where any of them was logged."""
    figure = draw_comparison(rows, names, metrics, diverged_configs(rows))
    if figure is not None:
        with written_whole(picture) as path:
            figure.savefig(path, dpi=110, format="png")


def write_tables(
    cells: Sequence[Cell],
    names: Sequence[str],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]],
    output: Path,
) -> list[SummaryRow] | None:
    """Write and print what the finished cells say; return the summary, None where no cell is finished."""
    rows = collect_results(cells)
    write_results(rows, output / RESULTS)
    if not rows:
        return None
    logged = sorted({row["metric"] for row in rows})
    remarks = {
        "Diverged": [f"{config} seed {seed}: {text}" for (config, seed), text in diverged_cells(rows).items()],
        "Not paired": unpaired_seeds(cells),
        "Not finished": [cell.label for cell in cells if not cell.is_finished()],
    }
    rows = with_stops(rows)
    write_curves(rows, names, metrics, output / "curves.png")
    summary = summarise(rows, names, metrics, references)
    print(write_summary(summary, remarks, output))
    if absent := [metric for metric in metrics if metric not in logged]:
        near = "".join(did_you_mean(metric, logged) for metric in absent)
        print(f"never logged: {', '.join(absent)};{near} --metrics takes {', '.join(logged)}", file=sys.stderr)
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap compare",
        description=__doc__,
        epilog=FILE_FORM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="recipes, or files with `base` and `variants`")
    parser.add_argument("--seeds", default="0:8", help="0:8 or 0,3,5 (default: %(default)s)")
    parser.add_argument("--output", required=True, type=Path, help="folder for the cells and the tables")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, one thread and one CUDA device each (default: %(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override in every cell")
    parser.add_argument(
        "--metrics", help="metrics of the summary, by the last value of each (default: what CONFIG says in `metrics`)"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run, or go on with, the comparison that `arguments` describe; then write its tables and its picture.

    Raises:
        UsageError: arguments that make no sense.
        SystemExit: with code 1 where cells failed, with 130 on an interrupt; what is finished is kept, and running
            again resumes.
    """
    options = _parser().parse_args(list(arguments))
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs} must be at least 1")
    variants = [variant for name in options.configs for variant in read_variants(name)]
    name = " + ".join(recipe_name(find_recipe(name)) for name in options.configs)
    extra = [f"--{item}" for item in options.set]
    cells = plan_cells(variants, parse_seeds(options.seeds), options.output, extra, name)
    metrics = options.metrics.split(",") if options.metrics else summary_metrics(options.configs)
    check_cells(cell for cell in cells if not cell.is_finished())
    make_output_folder(options.output)
    with only_comparison(options.output):
        _run_and_write(cells, [variant.name for variant in variants], metrics, options)


@contextlib.contextmanager
def only_comparison(output: Path) -> Iterator[None]:
    """Hold the folder of a comparison; the lock of one that was killed is free.

    Raises:
        UsageError: another process holds it.
    """
    try:
        with FileLock(output / LOCK, timeout=0):
            yield
    except Timeout:
        raise UsageError(
            f"--output {output}: another `attnswap compare` is at work there; wait for it, or give another folder"
        ) from None


def _run_and_write(
    cells: Sequence[Cell], names: Sequence[str], metrics: Sequence[str], options: argparse.Namespace
) -> None:
    for cell in cells:
        cell.refuse_links()
    try:
        failures = run_cells(cells, options.jobs)
    except KeyboardInterrupt:
        write_tables(cells, names, metrics, summary_references(options.configs), options.output)
        finished = sum(cell.is_finished() for cell in cells)
        print(f"interrupted: {finished} of {len(cells)} cells are finished; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    summary = write_tables(cells, names, metrics, summary_references(options.configs), options.output)
    if summary == []:
        raise SystemExit("the summary is empty: none of its metrics was logged; the cells are kept")
    if failures:
        reasons = "".join(f"\n  {cell.label}: {text}" for cell, text in failures)
        raise SystemExit(
            f"{len(failures)} of {len(cells)} cells failed; the same command runs only those again:{reasons}"
        )
