"""What the command does about loggers: a CSV log always, and one folder a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

RUNS = Path("runs")


def claim_run_folder(recipe: str, root: Path) -> Path:
    """Make and return the first free `root/recipe/version_N`; two jobs that start at once get two folders.

    Processes other than rank zero write nothing: they make no folder.
    """
    parent, number = root / recipe, 0
    if getattr(rank_zero_only, "rank", 0) != 0:
        return parent / "version_0"
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            (parent / f"version_{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return parent / f"version_{number}"


def release_run_folder(folder: Path, root: Path) -> None:
    """Remove the folder of a run that could not begin, and those above it up to `root`, as far as they are empty."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return
    for path in (folder, *folder.parents):
        if root not in (path, *path.parents):
            return
        try:
            path.rmdir()
        except OSError:
            return


def with_csv_logger(loggers: Any, recipe: str, root: Path) -> tuple[list[Any], Path]:
    """The `trainer.logger` value(s) of a configuration with a CSV logger first, and the folder of the run.

    The folder is a new one, also where the configuration names that of a run that was logged: a CSV logger would
    delete its log. A logger that writes files and names no folder of its own writes into the run's.
    """
    given = _listed(loggers)
    csv, old = _csv_logger_of(given)
    folder = old if old and not (old / "metrics.csv").exists() else claim_run_folder(*_place(old, recipe, root))
    others = [logger for logger in given if logger is not csv]
    for arguments in [logger["init_args"] for logger in others if "init_args" in logger]:
        if "save_dir" in arguments and arguments["save_dir"] in (None, ".", str(old)):
            arguments["save_dir"] = str(folder)
    return [_csv_logger(folder, csv), *others], folder


def runs_folder(loggers: Any, recipe: str, root: Path) -> Path:
    """The folder in which :func:`with_csv_logger` makes that of a run, beside those of earlier runs."""
    name, parent = _place(_csv_logger_of(_listed(loggers))[1], recipe, root)
    return parent / name


def _listed(loggers: Any) -> list[Any]:
    return (
        []
        if isinstance(loggers, (bool, type(None)))
        else list(loggers)
        if isinstance(loggers, (list, tuple))
        else [loggers]
    )


def _csv_logger_of(loggers: list[Any]) -> tuple[Any, Path | None]:
    """The CSV logger among the loggers and its folder, None where there is none."""
    csv = next((logger for logger in loggers if _is_csv(logger)), None)
    return csv, None if csv is None else _folder(csv["init_args"])


def _place(old: Path | None, recipe: str, root: Path) -> tuple[str, Path]:
    return (recipe, root) if old is None else (old.parent.name, old.parent.parent)


def _folder(init_args: Any) -> Path | None:
    if init_args.get("version") is None:
        return None
    return Path(init_args["save_dir"], init_args.get("name") or "", str(init_args["version"]))


def _csv_logger(folder: Path, csv: Any) -> dict[str, Any]:
    """The CSV logger of a run, with what the configuration says of it beside the folder."""
    given = {} if csv is None else dict(csv["init_args"].items())
    place = {"save_dir": str(folder.parent.parent), "name": folder.parent.name, "version": folder.name}
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {**given, **place}}


def _is_csv(logger: Any) -> bool:
    return str(logger["class_path"]).rsplit(".", 1)[-1] == CSVLogger.__name__
