"""What a report shows as one: runs of one configuration by seed, and the names that tell configurations apart."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lightning_tasks.compare.reading import Read, prefixed, read_comparison
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.run import LOG, Run, is_comparison, read_run
from lightning_tasks.runs.settings import same_but_for_the_run, saved_seed

MOST_FOLDERS = 20_000  # that are looked into below one; walking a whole disk would take minutes
_T = TypeVar("_T")


def read_all(folders: Sequence[Path]) -> Read:
    """Read run folders and folders of comparisons; runs that differ in their seed alone are one configuration.

    One that cannot be read and was found below a folder, beside others, is left out and said.

    Raises:
        UsageError: a folder that is neither, a file in it that cannot be read, or one folder twice; it is named.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError(f"a folder is given twice: {', '.join(map(str, folders))}")
    given, folders, below = folders, [], []
    for folder in given:
        found_below, said = every_run_below(folder)
        folders += found_below or [folder]
        below += said
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError(f"a folder is given twice, by itself and below another: {', '.join(map(str, given))}")
    compared = [folder for folder in folders if is_comparison(folder)]
    read_runs, damaged = readable_ones(read_run, [folder for folder in folders if folder not in compared])
    comparisons, damaged_too = readable_ones(read_comparison, compared)
    damaged.update(damaged_too)
    if damaged and not (read_runs or comparisons):
        raise next(iter(damaged.values()))
    for folder, error in damaged.items():
        if folder in given:
            raise error
        below.append(f"{folder} cannot be read and is left out: {error}")
        warnings.warn(below[-1], stacklevel=2)
    alone, notes = group_runs(list(read_runs.values()))
    found = list(comparisons.values())
    if len(folders) > 1:
        found = [prefixed(read, name) for read, name in zip(found, distinct_names(list(comparisons)), strict=True)]
    runs = [*alone, *(run for read in found for run in read.runs)]
    return Read(
        runs,
        [row for read in found for row in read.summary],
        [*below, *notes, *(note for read in found for note in read.notes), *uneven_ends(runs)],
        [origin for read in found for origin in read.origins],
    )


def readable_ones(read: Callable[[Path], _T], folders: Sequence[Path]) -> tuple[dict[Path, _T], dict[Path, UsageError]]:
    """What `read` gives of each folder, and the errors of those that it cannot read."""
    found: dict[Path, _T] = {}
    damaged: dict[Path, UsageError] = {}
    for folder in folders:
        try:
            found[folder] = read(folder)
        except UsageError as error:
            damaged[folder] = error
    return found, damaged


def every_run_below(folder: Path) -> tuple[list[Path], list[str]]:
    """The folders of runs and comparisons below one that is neither, and sentences on them; links are not followed.

    Raises:
        UsageError: a folder below cannot be read, or there are more than `MOST_FOLDERS`.
    """
    if not folder.is_dir() or (folder / LOG).exists() or is_comparison(folder):
        return [], []

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error

    found: list[Path] = []
    links: list[str] = []
    for number, (name, inside, _) in enumerate(os.walk(folder, onerror=refuse)):
        if number == MOST_FOLDERS:
            raise UsageError(f"{folder} has more than {MOST_FOLDERS:,} folders below it: give those that hold the runs")
        place = Path(name)
        if (place / LOG).exists() or is_comparison(place):
            found.append(place)
            inside.clear()
        inside.sort()
        links += [str(place / child) for child in inside if (place / child).is_symlink()]
    compared = sum(map(is_comparison, found))
    runs, comparisons = _counted(len(found) - compared, "run"), _counted(compared, "comparison")
    notes = [f"{folder}: below it {runs} and {comparisons} were found"] if found else []
    if found and links:
        notes.append(f"{folder}: links to folders, not followed (give them by themselves): {', '.join(links)}")
    return found, notes


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with its parent's before it where two are the same, or else the whole path."""
    whole = [folder.resolve() for folder in folders]
    shortest = [[path.name for path in whole], [f"{path.parent.name}/{path.name}" for path in whole]]
    return next((names for names in shortest if len(set(names)) == len(names)), [str(path) for path in whole])


def group_runs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs whose settings differ in the seed and in folders alone get one name, and each the seed of its settings.

    Returns:
        The runs, one per seed, and sentences about those that are left out or do not say their seed.
    """
    groups: list[list[Run]] = []
    for run in runs:
        key = None if run.settings is None else same_but_for_the_run(run.settings)
        for group in groups:
            if key is not None and group[0].settings is not None and same_but_for_the_run(group[0].settings) == key:
                group.append(run)
                break
        else:
            groups.append([run])
    names = [group[0].config for group in groups]
    recipes = [name.rpartition("/")[0] for name in names]
    if len(set(recipes)) == len(recipes):
        names = recipes  # the number of a version says nothing then
    elif len(set(names)) < len(names):
        names = [str(group[0].folder) for group in groups]
    seeds = [one_a_seed(name, group) for name, group in zip(names, groups, strict=True)]
    return [run for found, _ in seeds for run in found], [note for _, notes in seeds for note in notes]


def one_a_seed(name: str, group: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs of a configuration with their seeds; of a seed that is there twice, the one that got furthest.

    Of several that got as far it is the newest. A run beside others that does not say its seed is no seed, but a
    configuration of its own, which has the name of its folder (:func:`distinct_names`).

    Returns:
        The runs under this name, and sentences about what was left out or is not known.
    """
    by_seed: dict[int, list[Run]] = {}
    unknown: list[Run] = []
    for run in group:
        seed = saved_seed(run.settings)
        (unknown if seed is None else by_seed.setdefault(seed, [])).append(run)
    runs, notes = [], []
    for seed, same in by_seed.items():
        kept = max(same, key=lambda run: (last_step(run), (run.folder / LOG).stat().st_mtime_ns))
        runs.append(replace(kept, config=name, seed=seed))
        if left_out := [str(run.folder) for run in same if run is not kept]:
            notes.append(
                f"{name}: seed {seed} is there {len(same)} times and counts once, by {kept.folder} (the furthest, and "
                f"of those the newest); left out: {', '.join(left_out)}"
            )
    alone = len(group) == 1
    apart = distinct_names([run.folder for run in unknown])
    runs += [
        replace(run, config=name if alone else f"{name}, {own}", seed=0)
        for run, own in zip(unknown, apart, strict=True)
    ]
    notes += [f"{run.config}: {run.folder / LOG} holds no number" for run in runs if not run.rows]
    if unknown and len(group) > 1:
        notes.append(f"{name}: {len(unknown)} of its runs do not say their seed, and stand apart: they are no seeds")
    return runs, notes


def uneven_ends(runs: Sequence[Run]) -> list[str]:
    """A sentence for each configuration whose runs end at different steps, so that last values are no repetitions."""
    ends: dict[str, dict[int, list[str]]] = {}
    for run in runs:
        ends.setdefault(run.config, {}).setdefault(last_step(run), []).append(str(run.seed))
    return [
        f"{config}: its runs end at different steps, and their last values are of these: "
        + "; ".join(f"step {step} of seed {', '.join(seeds)}" for step, seeds in sorted(of_config.items()))
        for config, of_config in ends.items()
        if len(of_config) > 1
    ]


def last_step(run: Run) -> int:
    """The last step of which something was logged, -1 where nothing was."""
    return max((row["step"] for row in run.rows), default=-1)
