"""`attnswap compare`: configurations x seeds, paired by seed, resumable, into one long table and one summary."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_tasks.compare.arguments import cell_parser, executor_options, parser, without_executor
from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.choice import NOTHING, Choice
from lightning_tasks.compare.cluster.dashboard import log_verdict
from lightning_tasks.compare.cluster.lease import PATIENCE, HeldError, held
from lightning_tasks.compare.cluster.plan_file import Plan, commands, find_cell, read_plan, status, write_plan
from lightning_tasks.compare.cluster.run import run_held
from lightning_tasks.compare.cluster.several import HELD
from lightning_tasks.compare.cluster.submit import JOBS, submit
from lightning_tasks.compare.plan import (
    check_cells,
    keeps_checkpoints,
    parse_seeds,
    plan_cells,
    summary_endpoints,
    summary_metrics,
    summary_references,
)
from lightning_tasks.compare.record import (
    Record,
    changed_endpoints,
    environment_of,
    read_record,
    record_of,
    write_record,
)
from lightning_tasks.compare.selection import Select, candidates, choose, chosen, plan_selection, read_select
from lightning_tasks.compare.summary import Endpoints, SummaryRow, count_comparisons
from lightning_tasks.compare.tables import write_tables
from lightning_tasks.compare.workers import failure, failures_by_reason, run_cells
from lightning_tasks.errors import UsageError, reason, refusal_in
from lightning_tasks.recipes.schema import NOT_USED, is_part_of
from lightning_tasks.recipes.shipped import offered
from lightning_tasks.recipes.variants import Variant, full_name, read_variants
from lightning_tasks.runs.environment import mixed_environments, this_environment
from lightning_tasks.runs.folder import make_output


def main(arguments: Sequence[str]) -> None:
    """Run, or go on with, the comparison that `arguments` describe; then write its tables and its figure.

    Raises:
        UsageError: arguments that make no sense, or an `--output` that is no folder.
        SystemExit: with code 1 where cells failed, with 130 on an interrupt; what is finished is kept, and running
            again resumes.
    """
    options = parser(arguments).parse_args(list(arguments))
    if options.status:
        comparison, _ = planned(Path(options.configs[0]))
        print(status([*comparison.to_select, *comparison.cells]))
        return
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs} must be at least 1")
    comparison = comparison_of(options)
    unfinished = [cell for cell in (*comparison.to_select, *comparison.to_run) if not cell.is_finished()]
    elsewhere = options.plan or options.executor is not None
    comparison = replace(comparison, processes=check_cells(unfinished, one_node=not elsewhere))
    make_output(options.output)
    try:
        if elsewhere:
            cells = _write_plan(comparison, without_executor(arguments))
            if options.executor:
                _submit(cells, options)
            else:
                print("".join(commands(cells, options.output)), end="")
        else:
            _run_and_write(comparison, options.jobs)
    except OSError as error:  # a full disk
        raise UsageError(
            f"{reason(error)}; cells that are finished are kept in {options.output}, and the same command goes on"
        ) from error


DIVERGED = 3


def run_one(arguments: Sequence[str]) -> None:
    """Run `attnswap cell` with these arguments: one cell of a plan, which another process may run at the same time.

    Raises:
        UsageError: there is no such plan or cell, or its code or files are others than those of the plan.
        SystemExit: with 1 where the cell failed, 3 where its run diverged, 75 where another process runs it.
    """
    options = cell_parser().parse_args(list(arguments))
    comparison, plan = planned(options.folder)
    cell = find_cell([*comparison.to_select, *comparison.planned], options.variant, options.seed)
    if not cell.is_finished():
        try:
            run_held(cell, plan.sources.get(cell.name))
        except HeldError as error:
            print(error, file=sys.stderr)
            raise SystemExit(HELD) from None
        except Exception as error:
            if isinstance(error, UsageError) or refusal_in(error) is not None:
                raise
            raise SystemExit(f"{cell.label} failed: {failure(cell, error)}; log: {cell.log}") from error
    stopped = str(cell.result().get("stopped", ""))
    print(f"{cell.label}: {f'diverged: {stopped}' if stopped else 'finished'}")
    if stopped:
        raise SystemExit(DIVERGED)


def planned(output: Path) -> tuple[Comparison, Plan]:
    """The comparison of a plan, in the folder where it was made.

    Raises:
        UsageError: there is no plan, or no such folder.
    """
    output = output.resolve()
    plan = read_plan(output)
    if not os.path.isdir(plan.folder):
        raise UsageError(f"the plan in {output} was made in {plan.folder}, which is not here")
    os.chdir(plan.folder)
    options = parser(plan.arguments).parse_args(plan.arguments)
    return replace(comparison_of(options), output=output, processes=plan.processes), plan


def _submit(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    jobs = submit(cells, options.output, executor_options(options))
    numbers = f", {jobs[0]} the first and {jobs[-1]} the last" if jobs else ""
    print(f"submitted {len(jobs)} jobs{numbers}; their logs are in {options.output / JOBS}")
    print(f"attnswap compare {options.output} --status; the same command without --executor writes the tables")


def _write_plan(comparison: Comparison, arguments: list[str]) -> list[Cell]:
    """Write the plan; return its cells."""
    cells = [*comparison.to_select, *comparison.to_run]
    sources = {cell.name: cell.sources for cell in cells}
    write_plan(Plan(os.getcwd(), arguments, sources, dict(comparison.processes)), comparison.output)
    _with_changed_endpoints(comparison).write_record()
    if waiting := len([cell for cell in comparison.cells if cell.name in comparison.asked]) - len(comparison.to_run):
        print(
            f"attnswap: {waiting} cells wait until these have chosen values; give --plan again",
            file=sys.stderr,
        )
    return cells


def comparison_of(options: argparse.Namespace) -> Comparison:
    """What the arguments describe.

    Raises:
        UsageError: they make no sense.
    """
    for key in (item.partition("=")[0] for item in options.set):
        if found := [name for name in NOT_USED if is_part_of(key, name)]:
            raise UsageError(f"--set {key}: `attnswap compare` sets {found[0]} of each cell; leave it out")
    variants = [variant for name in options.configs for variant in read_variants(name)]
    seeds, endpoints = parse_seeds(options.seeds), summary_endpoints(options.configs)
    metrics = list(dict.fromkeys(options.metrics.split(","))) if options.metrics else summary_metrics(options.configs)
    if endpoints.primary not in ("", *metrics):
        raise UsageError(f"--metrics leaves out {endpoints.primary}, the primary endpoint, which decides; name it too")
    references = summary_references(options.configs)
    comparisons = count_comparisons([variant.name for variant in variants], references)
    endpoints = replace(endpoints, comparisons=comparisons)
    return Comparison(
        variants,
        seeds,
        options.output,
        tuple(f"--{item}" for item in options.set),
        " + ".join(full_name(name) for name in options.configs),
        metrics,
        references,
        endpoints,
        read_select(options.configs, seeds),
        keeps_checkpoints(options.configs) and not options.no_checkpoints,
        with_references(options.variant, variants, references),
        options.keep,
    )


@dataclass(frozen=True)
class Comparison:
    """What the command was asked for; what follows from results is found anew each time."""

    variants: Sequence[Variant]
    seeds: Sequence[int]
    output: Path
    extra: Sequence[str]
    name: str
    metrics: Sequence[str]
    references: Mapping[str, Sequence[str]]
    endpoints: Endpoints
    select: Select | None
    keep: bool
    asked: Collection[str]
    any_code: bool = False
    processes: Mapping[str, int] = field(default_factory=dict)

    @property
    def selection(self) -> list[Cell]:
        """The cells by which values are chosen."""
        cells = plan_selection(self.variants, self.select, self.output, self.extra, self.name)
        return self._with_settings(cells)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen so far."""
        return choose(self.variants, self.selection, self.select)

    @property
    def cells(self) -> list[Cell]:
        """The cells of the table: those of the variants that were asked for, and of the others what is finished."""
        return [cell for cell in self.planned if cell.name in self.asked or cell.is_finished()]

    @property
    def planned(self) -> list[Cell]:
        """Those of all variants."""
        variants = chosen(self.variants, self.choices)
        cells = plan_cells(variants, self.seeds, self.output, self.extra, self.name, self.keep)
        return self._with_settings(cells)

    def _with_settings(self, cells: Sequence[Cell]) -> list[Cell]:
        return [replace(each, any_code=self.any_code, processes=self.processes.get(each.name, 1)) for each in cells]

    @property
    def to_select(self) -> list[Cell]:
        """Those by which the values of the variants that were asked for are chosen."""
        names = {each.name for variant in self.variants if variant.name in self.asked for each in candidates(variant)}
        return [cell for cell in self.selection if cell.name in names]

    @property
    def to_run(self) -> list[Cell]:
        """Those of the table that were asked for and whose variant has no grid, or its choice."""
        decided = {choice.variant for choice in self.choices if choice.chosen != NOTHING}
        waiting = {each.name for each in self.variants if each.grid} - decided
        return [cell for cell in self.cells if cell.name in self.asked and cell.name not in waiting]

    @property
    def shown_references(self) -> dict[str, list[str]]:
        """The references between variants of which the tables have cells."""
        shown = {cell.name for cell in self.cells}
        found = {name: [other for other in others if other in shown] for name, others in self.references.items()}
        return {name: others for name, others in found.items() if name in shown and others}

    @property
    def shown_choices(self) -> list[Choice]:
        """What is chosen so far for variants of which the tables have cells."""
        shown = {cell.name for cell in self.cells}
        return [choice for choice in self.choices if choice.variant in shown]

    def write_record(self, failed: Collection[Cell] = ()) -> None:
        """Write `comparison.json`."""
        asked = self.to_select
        selection = [cell for cell in self.selection if cell in asked or cell.is_finished()]
        given = self.metrics, self.shown_references, failed, self.shown_choices, self.endpoints, selection
        write_record(record_of(self.cells, *given), self.output)

    def write_tables(self) -> list[SummaryRow] | None:
        """Write the tables and the figure, one process at a time."""
        said = [str(choice) for choice in self.shown_choices]
        given = self.metrics, self.shown_references, self.output, said, self.endpoints
        with held(self.output / "leases" / "tables", "writing the tables", PATIENCE):
            return write_tables(self.cells, *given, self.planned)


def with_references(
    names: Sequence[str], variants: Sequence[Variant], references: Mapping[str, Sequence[str]]
) -> set[str]:
    """The variants of these names and those that they are compared with; all of them where no name is given.

    Raises:
        UsageError: no variant has such a name.
    """
    known = [variant.name for variant in variants]
    for name in names:
        if name not in known:
            raise UsageError(f"--variant {name!r} is none of the variants; {offered(name, known)}")
    return {known[0], *names, *(other for name in names for other in references.get(name, ()))} if names else {*known}


def _with_changed_endpoints(comparison: Comparison) -> Comparison:
    """The comparison, which says how its endpoints were changed after cells had finished."""
    has_results = any(cell.is_finished() for cell in comparison.planned)
    changed = changed_endpoints(_record_before(comparison.output), comparison.endpoints, has_results)
    for text in changed:
        print(f"attnswap: warning: changed after cells had finished: {text}", file=sys.stderr)
    return replace(comparison, endpoints=replace(comparison.endpoints, changed=changed))


def _run_and_write(comparison: Comparison, jobs: int) -> None:
    for cell in (*comparison.selection, *comparison.cells):
        cell.refuse_links()
    comparison = _with_changed_endpoints(comparison)
    for text in _changed_code([*comparison.selection, *comparison.planned], comparison.any_code):
        print(f"attnswap: warning: {text}", file=sys.stderr)
    comparison.write_record()
    _print_plan([*comparison.to_select, *comparison.cells])
    failures: list[tuple[Cell, str]] = []
    try:
        if comparison.to_select:
            failures += run_cells(comparison.to_select, jobs)
            comparison.write_record([cell for cell, _ in failures])
            new = [cell for cell in comparison.to_run if cell.name not in comparison.processes]
            found = check_cells((cell for cell in new if not cell.is_finished()), one_node=True)
            comparison = replace(comparison, processes={**comparison.processes, **found})
        failures += run_cells(comparison.to_run, jobs)
    except KeyboardInterrupt:
        comparison.write_tables()
        comparison.write_record([cell for cell, _ in failures])
        cells = [*comparison.to_select, *comparison.cells]
        finished = sum(cell.is_finished() for cell in cells)
        print(f"interrupted: {finished} of {len(cells)} cells are finished; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    summary = comparison.write_tables()
    comparison.write_record([cell for cell, _ in failures])
    if summary == []:
        raise SystemExit("the summary is empty: none of its metrics was logged; the cells are kept")
    if summary:
        log_verdict(comparison.cells, summary, comparison.output)
    undecided = [
        str(each) for each in comparison.choices if each.variant in comparison.asked and each.chosen == NOTHING
    ]
    if failures:
        count = len(comparison.to_select) + len(comparison.cells)
        reasons = "".join(f"\n  {line}" for line in failures_by_reason(failures))
        reasons += "".join(f"\nnot run: {text}" for text in undecided)
        raise SystemExit(f"{len(failures)} of {count} cells failed; the same command runs only those again:{reasons}")
    if undecided:
        lines = "".join(f"\n  {text}" for text in undecided)
        raise SystemExit(f"`select` chose nothing for some variants, which are not run; give them other values:{lines}")


def _changed_code(cells: Sequence[Cell], kept: bool) -> list[str]:
    """A sentence for each change of code or files since cells had finished, and what becomes of them."""
    by_change: dict[str, list[str]] = {}
    for cell in dict.fromkeys(cells):
        if changed := cell.changed():
            by_change.setdefault(", ".join(changed), []).append(cell.label)
    then = "kept, as --keep asks" if kept else "not used; what is asked for is run again, and --keep would keep it"
    return [
        f"changed since {labels[0]}{f' and {len(labels) - 1} more' if labels[1:] else ''} had finished: {names}; {then}"
        for names, labels in by_change.items()
    ]


def _record_before(output: Path) -> Record | None:
    """What an earlier command wrote; None where it wrote nothing, or what is damaged, which is written anew."""
    try:
        return read_record(output)
    except UsageError:
        return None


def _print_plan(cells: Sequence[Cell]) -> None:
    """Say on stderr what is to be run, what its checkpoints take, and whether cells ran in other environments."""
    finished = [cell for cell in cells if cell.is_finished()]
    kept = [cell.checkpoint.stat().st_size for cell in finished if cell.checkpoint.is_file()]
    more = sum(cell.keep for cell in cells if cell not in finished)
    text = f"{len(cells)} cells, {len(finished)} finished"
    if more:
        size = (
            f"about {_megabytes(max(kept))} each, {_megabytes(more * max(kept))} in all"
            if kept
            else "weights and optimizer"
        )
        free = _megabytes(shutil.disk_usage(cells[0].output).free)
        text += f"; {more} more keep their last.ckpt ({size}; {free} are free), --no_checkpoints keeps none"
    print(f"attnswap: {text}", file=sys.stderr)
    if len(finished) < len(cells):
        found = [each for cell in finished if (each := environment_of(cell)) is not None]
        for remark in mixed_environments([*found, this_environment()]):
            print(f"attnswap: warning: {remark}", file=sys.stderr)


def _megabytes(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1e6:,.{0 if count >= 1e7 else 2}f} MB"
