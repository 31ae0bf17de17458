"""`plan.json`: a comparison whose cells are commands, `attnswap cell DIR VARIANT SEED`, and what became of each."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import mean

from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.cluster.lease import is_free, owner_of
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import Sources
from lightning_tasks.json_values import list_of, of_kind, text_of, texts_of
from lightning_tasks.runs.safe_files import MOST_TABLE_BYTES, refuse_foreign, written_whole

PLAN = "plan.json"


@dataclass(frozen=True)
class Plan:
    """What `attnswap compare --plan` was given, and the code and files of each variant then.

    Args:
        folder: where it was called, which relative paths count from.
        arguments: of `attnswap compare`, without `--plan`.
        sources: by variant.
        processes: of a cell, a device each, by variant.
    """

    folder: str
    arguments: list[str]
    sources: dict[str, Sources]
    processes: dict[str, int]


def write_plan(plan: Plan, output: Path) -> None:
    """Write it.

    Raises:
        UsageError: another plan is there.
    """
    path = output / PLAN
    if os.path.lexists(path) and (before := read_plan(output)).arguments != plan.arguments:
        raise UsageError(
            f"{path} is a plan of other arguments: attnswap compare {shlex.join(before.arguments)}. Give another "
            "--output, or delete it"
        )
    with written_whole(path) as partial:
        partial.write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")


def read_plan(output: Path) -> Plan:
    """The plan in the folder of a comparison. It is trusted as the comparison file is, which it names.

    Raises:
        UsageError: there is none, it is damaged, or a link out of the folder.
    """
    path = output / PLAN
    if not os.path.lexists(path):
        raise UsageError(f"{output} has no {PLAN}: attnswap compare FILE --output {output} --plan writes it")
    refuse_foreign(path, output, MOST_TABLE_BYTES)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        sources = {text_of(name): texts_of(each) for name, each in of_kind(given["sources"], dict).items()}
        processes = {text_of(name): of_kind(each, int) for name, each in of_kind(given["processes"], dict).items()}
        return Plan(text_of(given["folder"]), list_of(given["arguments"], str), sources, processes)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error}); write it anew by --plan") from error


def commands(cells: Iterable[Cell], output: Path) -> list[str]:
    """A line for each cell that is not finished."""
    place = str(output.resolve())
    return [
        shlex.join(["attnswap", "cell", place, cell.name, str(cell.seed)]) + "\n"
        for cell in cells
        if not cell.is_finished()
    ]


def status(cells: Sequence[Cell]) -> str:
    """What became of each cell: finished, diverged, who runs it, or waiting; and about how long the rest takes."""
    finished = [cell for cell in cells if cell.is_finished()]
    running = {
        cell: owner
        for cell in cells
        if cell not in finished and not is_free(cell.lease) and (owner := owner_of(cell.lease)) is not None
    }
    lines = []
    for cell in cells:
        if cell in finished:
            state = "diverged" if cell.result().get("stopped") else "finished"
        else:
            state = f"run by {running[cell]}" if cell in running else _waits(cell)
        lines.append(f"{cell.label}: {state}" + (f" ({cell.processes} processes)" if cell.processes > 1 else ""))
    done, share = len(finished), len(finished) / max(1, len(cells))
    bar = "#" * round(20 * share) + "." * (20 - round(20 * share))
    text = f"[{bar}] {done} of {len(cells)} cells finished, {len(running)} run"
    if finished and done < len(cells):
        seconds = mean(float(cell.result().get("seconds", 0.0)) for cell in finished)
        minutes = ceil((len(cells) - done) * seconds / max(1, len(running)) / 60)
        text += f"; about {minutes} minute{'s' * (minutes != 1)} at this pace"
    return "\n".join([*lines, text])


def _waits(cell: Cell) -> str:
    """That a cell waits; and what was there of it before, if anything was."""
    if changed := cell.changed():
        return f"waiting to be run again, as it has changed since it had finished: {', '.join(changed)}"
    return f"waiting; it was begun before: {cell.log}" if cell.log.is_file() else "waiting"


def find_cell(cells: Sequence[Cell], variant: str, seed: int) -> Cell:
    """The cell of these names.

    Raises:
        UsageError: there is none.
    """
    for cell in cells:
        if (cell.name, cell.seed) == (variant, seed):
            return cell
    known = list(dict.fromkeys(cell.name for cell in cells))
    seeds = ", ".join(str(cell.seed) for cell in cells if cell.name == variant)
    raise UsageError(
        f"{variant!r} has the seeds {seeds}, and no {seed}" if seeds else f"no variant {variant!r}; there are {known}"
    )
