"""What a comparison is of: variants of a recipe, seeds, references and metrics, and the cells that follow from them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.cluster.several import processes_of
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.errors import UsageError, reason, refusal_in
from lightning_tasks.recipes.schema import Comparison
from lightning_tasks.recipes.variants import Variant, find_named

MAX_SEEDS = 10_000
METRICS = (
    "val/perplexity",
    "val/loss",
    "val/attention/entropy/mean",
    "qk_spectrum/variance/layer_00",
    "qk_spectrum/scale/layer_00",
)


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


def summary_references(names: Sequence[str]) -> dict[str, list[str]]:
    """The references that comparison files ask for, by variant."""
    return {name: [*others] for each in _whole(names) for name, others in each.references.items()}


def summary_endpoints(names: Sequence[str]) -> Endpoints:
    """The primary endpoint and the margins that comparison files ask for.

    Raises:
        UsageError: two files name another primary endpoint or margin.
    """
    primary = {each.primary for each in _whole(names) if each.primary}
    margins: dict[str, set[float]] = {}
    for name, margin in (pair for each in _whole(names) for pair in each.margins.items()):
        margins.setdefault(name, set()).add(margin)
    if len(primary) > 1 or any(len(each) > 1 for each in margins.values()):
        raise UsageError(f"{' and '.join(names)} have different `primary` or `margins`: compare them one by one")
    return Endpoints("".join(primary), {name: min(each) for name, each in margins.items()})


def keeps_checkpoints(names: Sequence[str]) -> bool:
    """Whether cells keep their last checkpoint: they do, unless a comparison file says `checkpoints: false`."""
    return all(found.checkpoints for found in _comparisons(names))


def summary_metrics(names: Sequence[str]) -> list[str]:
    """The metrics that comparison files ask for, or those of the language models where none does."""
    asked = [metric for found in _comparisons(names) for metric in found.metrics]
    return list(dict.fromkeys(asked)) or list(METRICS)


def _whole(names: Sequence[str]) -> list[Comparison]:
    """The comparisons that are named without one of their variants."""
    return [found for named in map(find_named, names) if named.variant is None and (found := named.comparison)]


def _comparisons(names: Sequence[str]) -> list[Comparison]:
    """The comparisons that are named, also by one of their variants."""
    return [found for named in map(find_named, names) if (found := named.comparison)]


def plan_cells(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    output: Path,
    extra: Sequence[str] = (),
    comparison: str = "",
    keep: bool = False,
) -> list[Cell]:
    """Every cell of the comparison of that name, seed by seed, so that an interrupted run leaves complete pairs.

    Raises:
        UsageError: two configurations have one name, or names of one folder.
    """
    cells = [
        Cell(
            *(variant.name, variant.config, (*variant.overrides, *extra), seed, str(output), variant.test, comparison),
            keep=keep,
        )
        for seed in seeds
        for variant in variants
    ]
    if len({cell.folder for cell in cells}) < len(cells):
        names = ", ".join(variant.name for variant in variants)
        raise UsageError(f"configurations must have different names, also with _ for other signs, got {names}")
    return cells


def check_cells(cells: Iterable[Cell], one_node: bool = False) -> dict[str, int]:
    """Parse what the cells of each configuration ask for and build its module, before the first of them runs.

    Args:
        cells: which.
        one_node: whether they run on this machine alone.

    Returns:
        how many processes a cell has, by configuration.

    Raises:
        UsageError: some of them are refused, or cannot be built.
    """
    from lightning_tasks.cli.fit import check_arguments
    from lightning_tasks.runs.wandb_runs import check_cell_loggers

    refused, processes = {}, {}
    for cell in {cell.name: cell for cell in cells}.values():
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                trainer = check_arguments(cell.arguments)
                check_cell_loggers(trainer.logger)
                if trainer.fast_dev_run or trainer.barebones:
                    raise UsageError(
                        "trainer.fast_dev_run and trainer.barebones log nothing, so that there is nothing to compare; "
                        "for a trial give trainer.max_steps and trainer.limit_val_batches"
                    )
            processes[cell.name] = processes_of(trainer, one_node)
        except Exception as error:
            refusal = error if isinstance(error, UsageError) else refusal_in(error)
            refused[cell.name] = reason(error) if refusal is None else str(refusal)
    if refused:
        lines = "".join(f"\n{name}: {text}" for name, text in refused.items())
        raise UsageError(f"nothing was run, as configurations are refused: {', '.join(refused)}{lines}")
    return processes
