"""Figures and tables of a run: files in its folder, and in the loggers that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.runs.loggers import current_step, loggers_named
from lightning_tasks.runs.safe_files import write_rows

TAKERS: dict[str, Callable[[Any, str, Any, Path, int], object]] = {  # logger, name, figure, its file, step
    "WandbLogger": lambda logger, name, _, path, step: logger.log_image(key=name, images=[str(path)], step=step),
    "TensorBoardLogger": lambda logger, name, figure, _, step: logger.experiment.add_figure(name, figure, step, False),
    "MLFlowLogger": lambda logger, name, _, path, step: logger.experiment.log_artifact(logger.run_id, path, "figures"),
    "CometLogger": lambda logger, name, _, path, step: logger.experiment.log_image(str(path), name=name, step=step),
}
_SAID: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def run_folder(trainer: Any) -> Path | None:
    """The folder of the run; None where nothing is logged, the trainer only tries the code, and beyond rank zero.

    That of the first logger, found without asking the other processes: figures are rank zero's alone. Loggers that
    have no folder per run, as W&B's, share ``save_dir``: there it is ``save_dir/name/version``, where the trainer puts
    their checkpoints (below ``default_root_dir`` where they have no ``save_dir`` either).
    """
    if not trainer.loggers or trainer.fast_dev_run or not trainer.is_global_zero:
        return None
    first = trainer.loggers[0]
    if first in loggers_named(trainer, "CSVLogger") + loggers_named(trainer, "TensorBoardLogger"):
        folder = Path(first.log_dir)
    else:
        version = first.version if isinstance(first.version, str) else f"version_{first.version}"
        folder = Path(first.save_dir or trainer.default_root_dir, str(first.name), version)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_figure(trainer: Any, figure: Any, name: str, a_file_per_step: bool = False) -> Path | None:
    """Write a Matplotlib figure to ``NAME.png`` in the run's folder and to the loggers that take images.

    Where there is ``a_file_per_step``, it is ``NAME_step_000100.png``. Call it on rank zero.
    """
    folder = run_folder(trainer)
    if folder is None:
        return None
    step = f"_step_{current_step(trainer):06d}" if a_file_per_step else ""
    path = folder / f"{name.replace('/', '_')}{step}.png"
    figure.savefig(path, dpi=150)
    for kind, take in TAKERS.items():
        for logger in loggers_named(trainer, kind):
            take(logger, name, figure, path, current_step(trainer))
    if name not in (said := _SAID.setdefault(trainer, set())):  # once a run, however often it is drawn anew
        said.add(name)
        rank_zero_info(f"figure: {path}")
    return path


def save_table(trainer: Any, path: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of equal keys as a CSV file, and as the table ``name`` of loggers that take one (W&B's).

    Call it on rank zero.
    """
    write_rows(path, rows[0], rows)
    for logger in trainer.loggers:
        if hasattr(logger, "log_table"):
            logger.log_table(key=name, columns=list(rows[0]), data=[list(row.values()) for row in rows])
