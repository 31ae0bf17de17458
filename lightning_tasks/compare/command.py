"""`attnswap compare`: configurations x seeds, paired by seed, resumable, into one long table and one summary."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_tasks.compare.arguments import parser
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.plan import (
    check_cells,
    parse_seeds,
    plan_cells,
    summary_metrics,
    summary_references,
)
from lightning_tasks.compare.record import record_of, write_record
from lightning_tasks.compare.tables import write_tables
from lightning_tasks.compare.workers import failures_by_reason, run_cells
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import make_output_folder
from lightning_tasks.variants import full_name, read_variants

LOCK = ".compare.lock"


def main(arguments: Sequence[str]) -> None:
    """Run, or go on with, the comparison that `arguments` describe; then write its tables and its figure.

    Raises:
        UsageError: arguments that make no sense.
        SystemExit: with code 1 where cells failed, with 130 on an interrupt; what is finished is kept, and running
            again resumes.
    """
    options = parser().parse_args(list(arguments))
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs} must be at least 1")
    variants = [variant for name in options.configs for variant in read_variants(name)]
    name = " + ".join(full_name(name) for name in options.configs)
    extra = [f"--{item}" for item in options.set]
    cells = plan_cells(variants, parse_seeds(options.seeds), options.output, extra, name)
    metrics = options.metrics.split(",") if options.metrics else summary_metrics(options.configs)
    check_cells(cell for cell in cells if not cell.is_finished())
    make_output_folder(options.output)
    with only_comparison(options.output):
        _run_and_write(cells, metrics, summary_references(options.configs), options)


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
    cells: Sequence[Cell], metrics: Sequence[str], references: Mapping[str, Sequence[str]], options: argparse.Namespace
) -> None:
    for cell in cells:
        cell.refuse_links()
    write_record(record_of(cells, metrics, references), options.output)
    try:
        failures = run_cells(cells, options.jobs)
    except KeyboardInterrupt:
        write_tables(cells, metrics, references, options.output)
        write_record(record_of(cells, metrics, references), options.output)
        finished = sum(cell.is_finished() for cell in cells)
        print(f"interrupted: {finished} of {len(cells)} cells are finished; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    summary = write_tables(cells, metrics, references, options.output)
    write_record(record_of(cells, metrics, references, [cell for cell, _ in failures]), options.output)
    if summary == []:
        raise SystemExit("the summary is empty: none of its metrics was logged; the cells are kept")
    if failures:
        reasons = "".join(f"\n  {line}" for line in failures_by_reason(failures))
        raise SystemExit(
            f"{len(failures)} of {len(cells)} cells failed; the same command runs only those again:{reasons}"
        )
