"""`comparison.json`: what a comparison was asked to do and, at its end, what became of each of its cells."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_tasks.compare.cell import RESULT, Cell
from lightning_tasks.compare.choice import Choice, parse_choice
from lightning_tasks.compare.summary import Endpoints
from lightning_tasks.errors import UsageError
from lightning_tasks.files.sources import Sources, mixed_sources
from lightning_tasks.json_values import list_of, number_of, of_kind, seed_of, text_of, texts_of
from lightning_tasks.recipes import recipe_name
from lightning_tasks.runs.divergence import diverged_cells
from lightning_tasks.runs.environment import Environment, mixed_environments, parse_environment, this_environment
from lightning_tasks.runs.log import COMPARISON
from lightning_tasks.runs.safe_files import refuse_foreign, written_whole

FINISHED, FAILED, WAITING = "finished", "failed", "waiting"
_DIGESTS = ("initial_weights", "training_data")


@dataclass(frozen=True)
class VariantRecord:
    """A configuration: the recipe that it starts from, and what the command line adds to it."""

    name: str
    base: str = ""
    overrides: list[str] = field(default_factory=list)
    test: bool = False


@dataclass(frozen=True)
class CellRecord:
    """A variant with a seed. What follows ``state``, but ``code``, is known of finished cells alone.

    Args:
        variant, seed: which cell it is.
        fingerprint: that of its settings, which its result has too; "" where it is not known.
        state: "finished", "failed" or "waiting".
        seconds: time of its run.
        initial_weights, training_data: digests, equal in the cells that make a pair.
        diverged: why its run counts as diverged; "" where it does not.
        checkpoint: of the end of its fit, a path in the folder of the comparison; "" where none was kept.
        environment: place among the record's environments; -1 where an earlier version ran the cell.
        code: place among the record's code, with which it ran or is to run; -1 where an earlier version ran the cell.
        runs: the machine of each of its starts, with the step that it went on from after a kill.
    """

    variant: str
    seed: int
    fingerprint: str = ""
    state: str = WAITING
    seconds: float = 0.0
    initial_weights: str = ""
    training_data: str = ""
    diverged: str = ""
    checkpoint: str = ""
    environment: int = -1
    code: int = -1
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """A comparison.

    Args:
        variants: in the order of the comparison file; the first is the reference of all others.
        references: further references, by variant.
        metrics: those of the summary.
        primary: the one of them that decides; "" where none was named.
        margins: by metric, the difference below which two variants count as equivalent.
        seeds: those that the last command asked for.
        cells: of these seeds, and those of the same settings that an earlier command finished.
        versions: of Python and of libraries, by name.
        choices: what was chosen for variants that have a grid, so far.
        environments: the different ones in which finished cells ran.
        comparisons: how many differences were asked for of each metric, also between variants that are not here; 0
            where an earlier version wrote the record.
        selection: the cells by which values are chosen; their variants are named by what each tries.
        changed: sentences on a primary endpoint or margins that were others when cells had finished already.
        code: the different states of code and files with which cells ran or are to run, by file or package.
    """

    variants: list[VariantRecord]
    references: dict[str, list[str]]
    metrics: list[str]
    seeds: list[int] = field(default_factory=list)
    cells: list[CellRecord] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    primary: str = ""
    margins: dict[str, float] = field(default_factory=dict)
    environments: list[Environment] = field(default_factory=list)
    comparisons: int = 0
    selection: list[CellRecord] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    code: list[Sources] = field(default_factory=list)

    @property
    def endpoints(self) -> Endpoints:
        """What the summary is told of its metrics."""
        return Endpoints(self.primary, self.margins, self.comparisons, tuple(self.changed))

    @property
    def configs(self) -> list[str]:
        """The names of the variants."""
        return [variant.name for variant in self.variants]


def record_of(
    cells: Sequence[Cell],
    metrics: Sequence[str],
    references: Mapping[str, Sequence[str]],
    failed: Collection[Cell] = (),
    choices: Sequence[Choice] = (),
    endpoints: Endpoints | None = None,
    selection: Sequence[Cell] = (),
) -> Record:
    """What is known now of a comparison of these cells; ``failed`` are those that the command ran in vain."""
    variants = {cell.name: cell for cell in cells}
    known = [*cells, *finished_before(variants.values(), cells)]
    ran_in = {cell: found for cell in (*known, *selection) if (found := environment_of(cell)) is not None}
    environments: list[Environment] = []
    for each in ran_in.values():
        if each not in environments:
            environments.append(each)

    ran_with = {
        cell: state
        for cell in (*known, *selection)
        if (state := cell.recorded_sources() if cell.is_finished() else cell.sources) is not None
    }
    code: list[Sources] = []
    for state in ran_with.values():
        if state not in code:
            code.append(state)

    def recorded(cell: Cell) -> CellRecord:
        place = environments.index(ran_in[cell]) if cell in ran_in else -1
        with_code = code.index(ran_with[cell]) if cell in ran_with else -1
        return replace(_cell_record(cell, cell in failed), environment=place, code=with_code)

    return Record(
        [VariantRecord(each.name, _base(each), [*each.overrides], each.test) for each in variants.values()],
        {name: [*others] for name, others in references.items()},
        [*metrics],
        list(dict.fromkeys(cell.seed for cell in cells)),
        [*map(recorded, known)],
        this_environment().versions,
        [*choices],
        endpoints.primary if endpoints else "",
        dict(endpoints.margins) if endpoints else {},
        environments,
        endpoints.comparisons if endpoints else 0,
        [*map(recorded, selection)],
        [*endpoints.changed] if endpoints else [],
        code,
    )


UNKNOWN = "perhaps the primary endpoint and margins: what was said before is in no comparison.json that can be read"
_MOST_CHANGES, _MOST_LETTERS = 1_000, 1_000


def changed_endpoints(before: Record | None, now: Endpoints, finished: bool) -> list[str]:
    """What was said otherwise of the metrics when cells had finished, in the words of earlier commands and of now.

    Args:
        before: what an earlier command wrote, which may have ended before it could write which cells finished.
        now: what is said now.
        finished: whether cells are finished now, before anything runs.
    """
    if before is None:
        return [UNKNOWN] if finished else []
    said = [*before.changed]
    says = before.primary or before.margins or before.comparisons  # earlier versions wrote none of these
    if says and (finished or any(cell.state == FINISHED for cell in before.cells)):
        if before.primary != now.primary:
            said.append(f"the primary endpoint, from {before.primary or 'none'} to {now.primary or 'none'}")
        for metric in sorted({*before.margins, *now.margins}):
            was, given = before.margins.get(metric), now.margins.get(metric)
            if was != given:
                said.append(f"the margin of {metric}, from {was or 'none'} to {given or 'none'}")
    return ["".join(letter if letter.isprintable() else " " for letter in each)[:_MOST_LETTERS] for each in said]


def environment_of(cell: Cell) -> Environment | None:
    """That in which a cell was run; None where it is not finished, or was run by an earlier version.

    Raises:
        UsageError: its result has something else there.
    """
    given = cell.result().get("environment") if cell.is_finished() else None
    try:
        return None if given is None else parse_environment(given)
    except (KeyError, TypeError, UnicodeEncodeError) as error:
        raise UsageError(
            f"{cell.folder / RESULT} is damaged ({error}); delete it, and its cell is run again"
        ) from error


def environment_remarks(cells: Sequence[Cell]) -> list[str]:
    """Sentences where finished cells ran in different environments, or with different code and files."""
    ran_in = [found for cell in cells if (found := environment_of(cell)) is not None]
    finished = [(cell.name, cell.recorded_sources()) for cell in cells if cell.is_finished()]
    ran_with = [(variant, state) for variant, state in finished if state is not None]
    return [*mixed_environments(ran_in), *mixed_sources(ran_with)]


def write_record(record: Record, output: Path) -> None:
    """Write ``comparison.json``, whole or not at all."""
    with written_whole(output / COMPARISON) as partial:
        partial.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """What :func:`write_record` wrote; None where there is no such file, as in folders of earlier versions.

    Raises:
        UsageError: the file is damaged or holds something else, is too large, or is a link out of the folder.
    """
    path = folder / COMPARISON
    if not os.path.lexists(path):
        return None
    refuse_foreign(path, folder)
    try:
        return _checked(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is damaged ({text}); the same `attnswap compare` writes it anew") from error


def _checked(given: Any) -> Record:
    """The record of plain data; other keys than ours, as a later version may write, are passed over."""
    found = Record(
        [_variant(each) for each in list_of(given["variants"], dict)],
        {text_of(name): list_of(others, str) for name, others in of_kind(given["references"], dict).items()},
        list_of(given["metrics"], str),
        [seed_of(each) for each in of_kind(given["seeds"], list)],
        [_cell(each) for each in list_of(given["cells"], dict)],
        texts_of(given["versions"]),
        [parse_choice(each) for each in list_of(given.get("choices", []), dict)],
        text_of(given.get("primary", "")),
        {text_of(name): _margin(value) for name, value in of_kind(given.get("margins", {}), dict).items()},
        [parse_environment(each) for each in list_of(given.get("environments", []), dict)],
        _count(given.get("comparisons", 0)),
        [_cell(each) for each in list_of(given.get("selection", []), dict)],
        _changes(given.get("changed", [])),
        [texts_of(each) for each in list_of(given.get("code", []), dict)],
    )
    names = set(found.configs)
    if len(names) < len(found.variants):
        raise ValueError("a variant is there twice")
    for what, cells in {"cells": found.cells, "selection": found.selection}.items():
        if len({(cell.variant, cell.seed) for cell in cells}) < len(cells):
            raise ValueError(f"{what} has a cell twice")
        if strange_place := [cell for cell in cells if not -1 <= cell.environment < len(found.environments)]:
            raise ValueError(f"a cell ran in environment {strange_place[0].environment}, of {len(found.environments)}")
        if strange_code := [cell for cell in cells if not -1 <= cell.code < len(found.code)]:
            raise ValueError(f"a cell ran with code {strange_code[0].code}, of {len(found.code)}")
    if strange := {*found.references, *(other for others in found.references.values() for other in others)} - names:
        raise ValueError(f"references has {min(strange)!r}, which is none of the variants")
    if strange := {cell.variant for cell in found.cells} - names:
        raise ValueError(f"cells has {min(strange)!r}, which is none of the variants")
    if strange := {choice.variant for choice in found.choices} - names:
        raise ValueError(f"choices has {min(strange)!r}, which is none of the variants")
    return found


def _variant(given: Any) -> VariantRecord:
    overrides, test = list_of(given["overrides"], str), of_kind(given["test"], bool)
    return VariantRecord(text_of(given["name"]), text_of(given["base"]), overrides, test)


def _cell(given: Any) -> CellRecord:
    texts = {key: text_of(given[key]) for key in ("variant", "fingerprint", "state", *_DIGESTS, "diverged")}
    texts["checkpoint"] = text_of(given.get("checkpoint", ""))
    seconds = number_of(given["seconds"])
    place, code = (of_kind(given.get(key, -1), int) for key in ("environment", "code"))
    runs = list_of(given.get("runs", []), str)
    return CellRecord(**texts, seed=seed_of(given["seed"]), seconds=seconds, environment=place, code=code, runs=runs)


def _changes(values: Any) -> list[str]:
    found = [text_of(each) for each in list_of(values, str)]
    if len(found) > _MOST_CHANGES or any(len(each) > _MOST_LETTERS or not each.isprintable() for each in found):
        raise ValueError(f"changed must be at most {_MOST_CHANGES:,} lines of {_MOST_LETTERS:,} letters that print")
    return found


def _margin(value: Any) -> float:
    if not 0 < number_of(value) < math.inf:
        raise ValueError(f"a margin is {str(value)[:80]}, and must be above 0")
    return float(value)


def _count(value: Any) -> int:
    if not 0 <= of_kind(value, int) < 1 << 32:
        raise ValueError(f"comparisons is {str(value)[:80]}, and must be a number of them")
    return int(value)


def _base(cell: Cell) -> str:
    return recipe_name(Path(cell.config))


def _cell_record(cell: Cell, failed: bool) -> CellRecord:
    known = CellRecord(cell.name, cell.seed, cell.fingerprint, FAILED if failed else WAITING)
    if not cell.is_finished():
        return known
    result = cell.result()
    rows = [{"config": cell.name, "seed": cell.seed, **row} for row in result["rows"]]
    return replace(
        known,
        state=FINISHED,
        seconds=float(result.get("seconds", 0.0)),
        runs=result["runs"],
        **{key: result[key] for key in _DIGESTS},
        diverged=diverged_cells(rows).get((cell.name, cell.seed), ""),
        checkpoint=str(cell.checkpoint.relative_to(cell.output)) if cell.checkpoint.is_file() else "",
    )


def finished_before(variants: Iterable[Cell], cells: Sequence[Cell]) -> Iterator[Cell]:
    """Finished cells of the same settings with other seeds: an earlier command asked for them."""
    asked = {(cell.name, cell.seed) for cell in cells}
    for variant in variants:
        for place in sorted(variant.folder.parent.glob("seed_*")):
            seed = place.name.removeprefix("seed_")
            if seed.isdecimal() and str(int(seed)) == seed and (variant.name, int(seed)) not in asked:
                with contextlib.suppress(UsageError):  # of a damaged result; who reads it says so
                    if (cell := replace(variant, seed=int(seed))).is_finished():
                        yield cell
