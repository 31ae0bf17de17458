"""How far the Hugging Face host reaches: a line for every folder of transformers that calls the attention interface.

``python -m tests.attention_modules.hosts.huggingface.breadth [FOLDER ...]`` tries the folders that
docs/hosts_huggingface.csv has no line for (or those given) and adds them to it; a folder takes some seconds, all of
them about half an hour. With ``--maps`` first it makes the column of maps anew, where softmax goes in: how far
`attention_maps` is from transformers' eager implementation.
"""

from __future__ import annotations

import csv
import multiprocessing
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[4] / "docs" / "hosts_huggingface.csv"
VERSION = "5.23"  # of transformers, which the file is of
SECONDS = 120  # that a folder may take
MODELS = 3  # of a folder that are tried for layers that the first ones did not have


@dataclass(frozen=True)
class Line:
    """What was seen of a folder."""

    folder: str
    result: str
    models: str = ""
    swapped: str = ""
    largest_difference: str = ""
    compared: str = ""
    symmetric: str = ""
    reason: str = ""
    maps: str = ""

    @property
    def same_maps(self) -> bool:
        """Whether every map is the eager implementation's, to 1e-5."""
        try:
            return float(self.maps) <= 1e-5
        except ValueError:
            return False


def tried(folder: str) -> Line:
    """Build tiny models of a folder until its attention classes were swapped, and see what they show."""
    from tests.attention_modules.hosts.huggingface.exercise import Shown, exercise
    from tests.attention_modules.hosts.huggingface.tiny import NotBuilt, classes_of, running

    callers, kinds = classes_of(folder)
    wanted, failures, models = {each.__name__ for each in callers}, [], []
    every = Shown()
    for kind in kinds:
        if len(models) >= MODELS or (models and not wanted - every.layers - every.left.keys()):
            break
        try:
            shown = exercise(*running(kind))
        except NotBuilt as error:
            failures.append(str(error))
            continue
        if models and not shown.layers - every.layers and not shown.problems:
            continue
        models.append(kind.__name__)
        every.layers |= shown.layers
        every.left |= {name: why for name, why in shown.left.items() if name in wanted}
        every.symmetric |= shown.symmetric
        every.problems += shown.problems
        for what, worst in shown.worst.items():
            every.worst[what] = max(every.worst.get(what, 0.0), worst)
    if not models:
        return Line(folder, "not tried", reason="; ".join(map(short, failures[:4])) or "no model class")
    refusals = [f"{name}: {why}" for name, why in sorted(every.left.items()) if name not in every.layers]
    faults = [each for each in every.problems if not each.startswith("refused: ")]
    refusals += [each for each in every.problems if each not in faults and not refusals]
    refused = not every.layers and not faults
    return Line(
        folder,
        "refused" if refused else "fault" if faults else "equal",
        " ".join(models),
        " ".join(sorted(every.layers)),
        f"{max(every.worst.values()):.0e}" if every.worst else "",
        ", ".join(every.worst),
        "; ".join(f"{name}: {short(why)}" if why else "taken" for name, why in _merged(every.symmetric).items()),
        "; ".join(map(short, [*faults, *refusals])),
    )


def _merged(symmetric: dict[str, str]) -> dict[str, str]:
    """Those that refuse, or one for all where none does."""
    refusing = {name: why for name, why in sorted(symmetric.items()) if why}
    return refusing or dict(list(symmetric.items())[:1])


def short(text: str) -> str:
    """On one line, of at most 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _maps(folder: str) -> str:
    from tests.attention_modules.hosts.huggingface.maps import maps_of

    return short(maps_of(folder))


def _child(folder: str, found: Any, work: Any = tried) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        found.put(work(folder))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        found.put(Line(folder, "fault", reason=short(said)) if work is tried else short(said))


def line_of(folder: str) -> Line:
    """As :func:`tried`, in a process of its own."""
    late = f"took more than {SECONDS} seconds, or the process ended"
    return _alone(tried, folder, Line(folder, "not tried", reason=late))


def _alone(work: Any, folder: str, late: Any) -> Any:
    """What ``work`` gives of a folder in a process of its own."""
    context = multiprocessing.get_context("forkserver")  # of a process that has run no backward pass
    context.set_forkserver_preload(["transformers", "attention_modules.hosts.huggingface"])
    found = context.Queue()
    process = context.Process(target=_child, args=(folder, found, work), daemon=True)
    process.start()
    try:
        return found.get(timeout=SECONDS)
    except Exception:
        return late
    finally:
        process.kill()
        process.join()


def read() -> dict[str, Line]:
    """The lines of the file, by folder."""
    if not FILE.is_file():
        return {}
    with FILE.open(newline="", encoding="utf-8") as file:
        return {row["folder"]: Line(**row) for row in csv.DictReader(file)}


def write(lines: dict[str, Line]) -> None:
    """Write the file, in the order of folders."""
    partial = FILE.with_suffix(".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(lines[folder]) for folder in sorted(lines))
    partial.replace(FILE)


def main(asked: list[str]) -> None:
    from tests.attention_modules.hosts.huggingface.tiny import folders

    lines = read()
    if asked[:1] == ["--maps"]:
        for folder in asked[1:] or [each for each in lines if lines[each].result == "equal"]:
            lines[folder] = replace(lines[folder], maps=_alone(_maps, folder, "took too long"))
            write(lines)
            print(folder, lines[folder].maps, flush=True)
        return
    for folder in asked or [each for each in folders() if each not in lines]:
        lines[folder] = line_of(folder)
        write(lines)
        print(folder, lines[folder].result, lines[folder].largest_difference, lines[folder].reason, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
