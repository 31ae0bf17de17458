"""Pictures of a run: a PNG in its folder, and an image in W&B and TensorBoard where these log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_tasks.callbacks.steps import current_step


def run_folder(trainer: Any) -> Path | None:
    """The folder of the run, None where nothing is logged (or the trainer only tries the code)."""
    if not trainer.loggers or trainer.fast_dev_run or trainer.log_dir is None:
        return None
    folder = Path(trainer.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_picture(trainer: Any, figure: Any, name: str) -> Path | None:
    """Write a Matplotlib figure to ``NAME.png`` in the run's folder and to the loggers that take images.

    Loggers are known by the names of their classes, in both Lightning packages. Call it on rank zero.
    """
    folder = run_folder(trainer)
    if folder is None:
        return None
    path = folder / f"{name.replace('/', '_')}.png"
    figure.savefig(path, dpi=150)
    for logger in trainer.loggers:
        kinds = {kind.__name__ for kind in type(logger).__mro__}
        if "WandbLogger" in kinds:
            logger.log_image(key=name, images=[str(path)])
        elif "TensorBoardLogger" in kinds:
            logger.experiment.add_figure(name, figure, current_step(trainer), close=False)
    rank_zero_info(f"picture: {path}")
    return path
