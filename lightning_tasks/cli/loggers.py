"""What the command does about loggers: a CSV log always, and one folder per run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from lightning_tasks.runs.folder import claim_run_folder


def with_csv_logger(loggers: Any, recipe: str, root: Path, own_place: bool = True) -> tuple[list[Any], Path]:
    """The `trainer.logger` value(s) of a configuration with a CSV logger first, and the folder of the run.

    The folder is a new one, also where the configuration names that of a run that was logged: a CSV logger would
    delete its log. With `own_place` the configuration's CSV logger says where it lies, without it `root` does. A logger
    that writes files and names no folder of its own writes into the run's.
    """
    given = _listed(loggers)
    csv = _csv_logger_of(given)
    old = None if csv is None else _folder(csv["init_args"])
    if own_place and old is not None and not (old / "metrics.csv").exists():
        folder = old
    else:
        folder = claim_run_folder(*_place(csv if own_place else None, recipe, root))
    others = [logger for logger in given if logger is not csv]
    for arguments in [logger["init_args"] for logger in others if "init_args" in logger]:
        if "save_dir" in arguments and arguments["save_dir"] in (None, ".", str(old)):
            arguments["save_dir"] = str(folder)
    return [_csv_logger(folder, csv), *others], folder


def planned_loggers(loggers: Any, recipe: str, root: Path) -> list[Any]:
    """The `trainer.logger` value(s) as :func:`with_csv_logger` completes them, before a run has its folder."""
    given = _listed(loggers)
    csv = _csv_logger_of(given)
    if csv is not None:
        return given
    # With the defaults that a parser would fill in, so that what is printed prints itself again.
    arguments = {name: each.default for name, each in inspect.signature(CSVLogger).parameters.items()}
    arguments |= {"save_dir": str(root), "name": recipe}
    return [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": arguments}, *given]


def runs_folder(loggers: Any, recipe: str, root: Path) -> Path:
    """The folder in which :func:`with_csv_logger` makes that of a run, beside those of earlier runs."""
    name, parent = _place(_csv_logger_of(_listed(loggers)), recipe, root)
    return parent / name


def _listed(loggers: Any) -> list[Any]:
    if loggers is None or isinstance(loggers, bool):
        return []
    return list(loggers) if isinstance(loggers, (list, tuple)) else [loggers]


def _csv_logger_of(loggers: list[Any]) -> Any:
    """The first CSV logger among the loggers, None where there is none."""
    return next((one for one in loggers if str(one["class_path"]).rsplit(".", 1)[-1] == CSVLogger.__name__), None)


def _place(csv: Any, recipe: str, root: Path) -> tuple[str, Path]:
    """The name under which runs are numbered, and the folder that it is below."""
    if csv is None:
        return recipe, root
    folder = _folder(csv["init_args"])
    if folder is not None:
        return folder.parent.name, folder.parent.parent
    return csv["init_args"].get("name") or "", Path(csv["init_args"]["save_dir"])


def _folder(init_args: Any) -> Path | None:
    """The folder of the run that a CSV logger's arguments name, None where they leave it open."""
    version = init_args.get("version")
    if version is None:
        return None
    name = version if isinstance(version, str) else f"version_{version}"
    return Path(init_args["save_dir"], init_args.get("name") or "", name)


def _csv_logger(folder: Path, csv: Any) -> dict[str, Any]:
    """The CSV logger of a run, with what the configuration says of it beside the folder."""
    given = {} if csv is None else dict(csv["init_args"].items())
    place = {"save_dir": str(folder.parent.parent), "name": folder.parent.name, "version": folder.name}
    return {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {**given, **place}}
