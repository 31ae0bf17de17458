"""A checkpoint at the end of the step in which a run is told to end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
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
    validation that is cut short, the resumed run begins anew. The file lies beside those of the trainer's
    :class:`~lightning.pytorch.callbacks.ModelCheckpoint`, and is named by epoch and step. Without such a
    callback nothing is saved. On several processes neither, as they may be told at different steps: the process that is
    told ends at once, and with it the others. With manual optimization a step ends with its batch. A file that is saved
    in a validation between the batches of a step lacks their gradients: a warning.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import SaveOnStop
        >>> trainer = Trainer(callbacks=[SaveOnStop()], logger=False)
    """

    _told = False  # of the signal, in a step that has not ended
    _before_validation: list[list[Tensor]] = []  # noqa: RUF012 - random states; replaced, never changed

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
            loop: Any = trainer.fit_loop.epoch_loop.val_loop
            loop.run = partial(self._validate, pl_module, type(loop).run.__get__(loop))

    def _validate(self, pl_module: pl.LightningModule, run: Callable[[], Any]) -> Any:
        self._before_validation = gather_random_states(pl_module.device)
        return run()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        vars(trainer.fit_loop.epoch_loop.val_loop).pop("run", None)

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
        self.on_train_end(trainer, pl_module)
        callback = trainer.checkpoint_callback
        folder = getattr(callback, "dirpath", None)
        told = type(exception).__name__ == "SIGTERMException" and trainer.state.fn == "fit"
        trying = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
        if not told or folder is None or trying or trainer.world_size > 1:
            return
        if trainer.validating:  # in which they have exchanged the model with its average
            for each in trainer.callbacks:  # type: ignore[attr-defined]  # not declared there
                if "WeightAveraging" in kinds_of(each):
                    each.on_validation_epoch_end(trainer, pl_module)
        if pl_module.automatic_optimization and trainer.fit_loop.epoch_loop._should_accumulate():
            rank_zero_warn(
                "SIGTERM came between the batches that a step accumulates: the checkpoint lacks their gradients, and "
                "the resumed run will differ from one that was not stopped"
            )
        path = Path(folder, f"stopped-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt")
        if trainer.validating:
            set_random_state(self._before_validation, trainer.global_rank, pl_module.device)
        with _epoch_open(trainer), _batch_open(trainer):
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


@contextlib.contextmanager
def _epoch_open(trainer: pl.Trainer) -> Iterator[None]:
    """Count an epoch that has just ended as one whose end is not yet done, as every checkpoint of an epoch's end does.

    Lightning would start a run that resumes from a closed epoch with an empty one.
    """
    epochs = trainer.fit_loop.epoch_progress
    closed = epochs.total.completed == epochs.total.ready
    for count in (epochs.total, epochs.current):
        count.completed -= closed
    yield
    for count in (epochs.total, epochs.current):
        count.completed += closed


@contextlib.contextmanager
def _batch_open(trainer: pl.Trainer) -> Iterator[None]:
    """Count a batch whose validation was cut short as one that is not completed, so that the validation comes again."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    for count in (batches.total, batches.current):
        count.completed -= trainer.validating
    yield
    for count in (batches.total, batches.current):
        count.completed += trainer.validating
