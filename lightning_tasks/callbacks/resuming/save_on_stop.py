"""A checkpoint at the end of the step in which a run is told to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_tasks.callbacks.base import Callback, kinds_of
from lightning_tasks.files.random_states import gather_random_states, set_random_state
from lightning_tasks.runs.folder import existing_part


class SaveOnStop(Callback):
    """Saves a checkpoint when SIGTERM ends a fit, as a scheduler sends it before it takes a machine away.

    The step, with all batches that it accumulates, or the validation batch that the signal meets ends first. A
    validation that is cut short, the resumed run begins anew, or a warning says why it cannot. The file lies beside
    those of the trainer's :class:`~lightning.pytorch.callbacks.ModelCheckpoint`, and is named by epoch and step.
    Without such a callback nothing is saved. On several processes neither, as they may be told at different steps: the
    process that is told ends at once, and with it the others. With manual optimization a step ends with its batch. A
    file that is saved in a validation between the batches of a step lacks their gradients: a warning.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SaveOnStop
        >>> trainer = Trainer(callbacks=[SaveOnStop()], logger=False)
    """

    _told = False  # of the signal, in a step that has not ended

    def __init__(self) -> None:
        super().__init__()
        self._before_validation: list[list[Tensor]] = []  # random states
        self._undo = ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace Lightning's handler of SIGTERM on several processes, before it is set.

        From within the handler it tells the others by a broadcast, which may meet another collective: then all hang.
        """
        self._told = False
        if trainer.world_size > 1:
            trainer._signal_connector._sigterm_notifier_fn = partial(_end_now, trainer)  # type: ignore[method-assign]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look before hours are spent whether checkpoints can be written.

        Raises:
            ValueError: a folder that a checkpoint callback writes into is a file, or not writable.
        """
        for folder in {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}:
            if folder is None or "://" in str(folder):
                continue
            there = existing_part(Path(folder).absolute())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise ValueError(f"checkpoints cannot be written to {folder}: {there} is not a folder that is writable")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have random states noted before each validation, whose loaders draw before its first hook."""
        if trainer.world_size == 1:
            self._undo.close()  # of a fit that ended in an error of another callback
            loop: Any = trainer.fit_loop.epoch_loop.val_loop
            self._undo.callback(_set_run, loop, vars(loop).get("run"))
            loop.run = partial(self._validate, pl_module, loop.run)

    def _validate(self, pl_module: pl.LightningModule, run: Callable[[], Any]) -> Any:
        self._before_validation = gather_random_states(pl_module.device)
        return run()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._undo.close()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Have Lightning see the signal at the end of the step: no checkpoint has gradients that were gathered."""
        connector, within = trainer._signal_connector, trainer.fit_loop.epoch_loop._should_accumulate()
        self._told = (self._told or connector.received_sigterm) and trainer.world_size == 1
        if self._told:
            connector.received_sigterm = not (within and pl_module.automatic_optimization)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the signal seen at once, also where a validation, or an epoch's end, comes between batches of a step."""
        trainer._signal_connector.received_sigterm |= self._told

    on_train_epoch_end = on_validation_start

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save where the exception is that of SIGTERM."""
        self._undo.close()
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None)
        told = type(exception).__name__ == "SIGTERMException" and trainer.state.fn == "fit"
        trying = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
        if not told or folder is None or trying or trainer.world_size > 1:
            return
        path = Path(folder, f"stopped-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
        if trainer.validating:
            for each in trainer.callbacks:  # type: ignore[attr-defined]  # not declared there
                if "WeightAveraging" in kinds_of(each):  # which has exchanged the model with its average
                    each.on_validation_epoch_end(trainer, pl_module)
            set_random_state(self._before_validation, trainer.global_rank, pl_module.device)
            _warn_of_lost_validation(trainer, pl_module, path)
        if pl_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate():
            rank_zero_warn(
                "SIGTERM came between the batches that a step accumulates: the checkpoint lacks their gradients, and "
                "the resumed run will differ from one that was not stopped"
            )
        epochs = trainer.fit_loop.epoch_progress
        # As every checkpoint of an epoch's end counts: from a closed one, Lightning would go on with an empty one.
        closed = epochs.total.completed == epochs.total.ready
        # A batch whose validation was cut short is not completed, so that its validation comes again.
        with _open(epochs, closed), _open(trainer.fit_loop.epoch_loop.batch_progress, trainer.validating):
            trainer.save_checkpoint(path)
        callback.last_model_path = str(path)  # type: ignore[union-attr]

    def on_predict_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """End a prediction, for which Lightning does not look at the signal."""
        if trainer.received_sigterm:
            raise SIGTERMException


def _end_now(trainer: pl.Trainer, number: int, frame: object) -> None:
    """End this process, and those that it launched; what waits for it in a collective fails as its connections close.

    Raises:
        SIGTERMException: the first time; what ends a run is not disturbed.
    """
    connector = trainer._signal_connector
    told, connector.received_sigterm = connector.received_sigterm, True
    if not told:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        raise SIGTERMException


def _set_run(loop: Any, run: Callable[[], Any] | None) -> None:
    """Have a loop run by what replaced its own method, or else by that again."""
    vars(loop).pop("run", None)
    if run is not None:
        loop.run = run


def _warn_of_lost_validation(trainer: pl.Trainer, pl_module: pl.LightningModule, path: Path) -> None:
    """Where a resumed run cannot begin the validation that is cut short anew."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    if not {"ExactResume", "BaseTask"} & set().union(*map(kinds_of, [pl_module, *callbacks])):
        why = "there is no ExactResume among the callbacks"
    elif getattr(trainer, "_val_check_time_interval", None) is not None:
        why = "val_check_interval is a time, which begins anew"
    elif trainer.global_step == trainer.max_steps:
        why = "it follows the last of max_steps"
    else:
        return
    rank_zero_warn(
        f"SIGTERM cut the validation at step {trainer.global_step} short, and a resumed run goes on behind it, as "
        f"{why}: `attnswap validate` with the configuration of the fit and --ckpt_path {path} makes up for it (from "
        f"Python: trainer.validate(module, ckpt_path={str(path)!r}))"
    )


@contextmanager
def _open(progress: Any, by: bool) -> Iterator[None]:
    """Count the last epoch or batch as one whose end is not yet done."""
    for count in (progress.total, progress.current):
        count.completed -= by
    try:
        yield
    finally:
        for count in (progress.total, progress.current):
            count.completed += by
