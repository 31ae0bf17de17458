"""The folder of a comparison, made again from the raw files beside a page, so that it goes on where its cells are lost.

python -m docs.pages.cells zoo/images docs/results/zoo/images runs/zoo_images
attnswap compare zoo/images --seeds 0:8 --variant scaled --output runs/zoo_images    # runs what is missing

Finished cells are written from `results.parquet` and `comparison.json`, and those by which values were chosen from the
scores that `comparison.json` has of them. Raw files have neither checkpoints nor what tests said of single images.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from docs.pages import tables
from docs.pages.comparison import RESULTS
from docs.pages.errors import PageError
from lightning_tasks.compare.cell import RESULT, Cell
from lightning_tasks.compare.choice import Tried
from lightning_tasks.compare.plan import plan_cells
from lightning_tasks.compare.record import FINISHED, Record, read_record, write_record
from lightning_tasks.compare.selection import candidates, chosen, plan_selection, read_select
from lightning_tasks.errors import UsageError
from lightning_tasks.recipes.variants import read_variants


def restore(recipe: str, raw: Path, output: Path) -> int:
    """Write the results of the cells that are finished; returns how many these are.

    Raises:
        PageError: there is no record, or it is of other settings than the recipe has now, or the table is damaged.
        UsageError: the record is damaged, or there is no such recipe.
    """
    record = read_record(raw)
    if record is None:
        raise PageError(f"{raw} has no comparison.json, by which cells could be told from those of other settings")
    results = [*_of_table(recipe, record, raw, output), *_of_selection(recipe, record, output)]
    for cell, result in results:
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    if results:
        write_record(record, output)  # the command that goes on sees which endpoints were named
    return len(results)


def _of_table(recipe: str, record: Record, raw: Path, output: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    listed = {(each.variant, each.seed): each for each in record.cells}
    known = {place for place, each in listed.items() if each.state == FINISHED and not each.diverged}
    searched = {choice.variant for choice in record.choices}  # a score too is of the settings that cells had
    rows = defaultdict(list)
    for row in tables.read(raw / RESULTS).to_pylist() if known else ():  # before the first cell there is no such file
        rows[row["config"], row["seed"]].append({key: row[key] for key in ("step", "metric", "value")})
    seeds = sorted({seed for _, seed in listed})
    for cell in plan_cells(chosen(read_variants(recipe), record.choices), seeds, output):
        place = cell.name, cell.seed
        if place not in listed or not (place in known or cell.name in searched):
            continue
        found = listed[place]
        if found.fingerprint != cell.fingerprint:
            raise PageError(f"{recipe} has other settings for {cell.label} than {raw} was made with; run it anew")
        if place not in known:
            continue
        if place not in rows:
            raise PageError(f"{raw / RESULTS} has no values of {cell.label}, which comparison.json calls finished")
        environment = record.environments[found.environment] if found.environment >= 0 else None
        yield (
            cell,
            {
                **_result(cell, rows[place]),
                "environment": None if environment is None else asdict(environment),
                "seconds": found.seconds,
                "initial_weights": found.initial_weights,
                "training_data": found.training_data,
            },
        )


def _of_selection(recipe: str, record: Record, output: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    variants, scores = read_variants(recipe), dict[str, Tried]()
    known, select = {each.name: each for each in variants}, read_select([recipe], [])
    for choice in record.choices:
        variant = known.get(choice.variant)
        if variant is None or [list(each) for each in variant.grid] != [each.overrides for each in choice.tried]:
            raise PageError(
                f"{recipe} has other values to choose from for {choice.variant} than were tried; run it anew"
            )
        if select is None or (choice.metric, tuple(choice.seeds)) != (select.metric, select.seeds):
            raise PageError(
                f"{recipe} has another metric or other seeds to choose by than {choice.variant} was; run it anew"
            )
        for candidate, tried in zip(candidates(variant), choice.tried, strict=True):
            if len(choice.seeds) == 1 and not tried.diverged:  # else the score is a mean of several runs, or of none
                scores[candidate.name] = tried
    for cell in plan_selection(variants, select, output, (), ""):
        if select is not None and cell.name in scores:
            row = {"step": 0, "metric": select.metric, "value": scores[cell.name].score}
            yield cell, {**_result(cell, [row]), "seconds": 0.0, "initial_weights": "", "training_data": ""}


def _result(cell: Cell, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = {"config": cell.name, "seed": cell.seed, "fingerprint": cell.fingerprint, "settings": cell.arguments[3:]}
    return {**known, "stopped": "", "rows": [*rows]}


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.pages.cells", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="the comparison")
    parser.add_argument("raw", type=Path, help="folder of its raw files")
    parser.add_argument("output", type=Path, help="folder for `attnswap compare --output`; must not exist")
    options = parser.parse_args(list(arguments))
    if options.output.exists():
        raise SystemExit(f"{options.output} exists; give another folder")
    try:
        print(f"{restore(options.recipe, options.raw, options.output)} cells", file=sys.stderr)
    except (PageError, UsageError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
