"""Checkpoints of a cell while it runs, from which it goes on after it was killed."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_tasks.compare.cell import Cell
from lightning_tasks.compare.cluster.unsaved import unsaved_state
from lightning_tasks.errors import UsageError, reason
from lightning_tasks.files.sources import Sources, changed_sources
from lightning_tasks.files.weights import read_checkpoint
from lightning_tasks.json_values import list_of, number_of, of_kind, text_of, texts_of
from lightning_tasks.runs.environment import this_environment
from lightning_tasks.runs.log import Rows, read_metrics
from lightning_tasks.runs.loggers import loggers_named
from lightning_tasks.runs.safe_files import read_result, refuse_foreign, written_whole

FILE = "progress.json"
_PARTS = 25  # of a fit, after each of which a checkpoint is due: a kill costs 4% of its steps
_PAUSE = 20.0  # to the next one, in times that the last one took: they cost at most 5% of the time


@dataclass(frozen=True)
class Progress:
    """How far a cell was at its last checkpoint.

    Args:
        fingerprint, sources: of the cell, its settings, code and files.
        ran_with: the code of attnswap and the versions of libraries.
        step: of the checkpoint.
        seconds: that it ran until then.
        rows: what it had logged.
        runs: on which machine it ran from which step, a text for each time that it was started.
    """

    fingerprint: str
    sources: Sources
    ran_with: dict[str, str]
    step: int
    seconds: float
    rows: Rows
    runs: list[str]


def ran_with() -> dict[str, str]:
    """The code of attnswap and the versions of libraries that run here."""
    here = this_environment()
    return {"code": here.code, **here.versions}


def checkpoint_of(cell: Cell, step: int) -> Path:
    """The file of a checkpoint."""
    return cell.folder / f"progress-{step}.ckpt"


def read_progress(cell: Cell, sources: Sources) -> Progress | None:
    """Where a cell of these settings, code and files goes on; None where it starts at its beginning.

    So it does where a file is damaged, or other code of attnswap or other libraries ran it before.
    """
    path = cell.folder / FILE
    try:
        refuse_foreign(path, Path(cell.output))
        given = read_result(path, ("fingerprint", "sources", "ran_with", "step", "rows"))
        found = Progress(
            text_of(given["fingerprint"]),
            texts_of(given["sources"]),
            texts_of(given["ran_with"]),
            of_kind(given["step"], int),
            number_of(given["seconds"]),
            list_of(given["rows"], dict),
            given["runs"],
        )
        if found.fingerprint != cell.fingerprint or changed_sources(found.sources, sources):
            return None
        if found.ran_with != ran_with():
            return None
        refuse_foreign(checkpoint_of(cell, found.step), Path(cell.output))
        read_checkpoint(checkpoint_of(cell, found.step))
    except (OSError, ValueError, TypeError, KeyError, UsageError):
        return None
    return found


def forget_progress(cell: Cell) -> None:
    """Remove the checkpoints of a cell."""
    for path in (cell.folder / FILE, *cell.folder.glob("progress-*.ckpt*")):
        if path.is_dir():  # of a strategy that shards
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def forget_or_note(cell: Cell, before: Progress | None, start: Progress) -> None:
    """After a failure that no checkpoint followed, note the try; forget the checkpoint where it is the second from it.

    The cause may be gone at the next start (a full device), or lie in the checkpoint: then it would fail each time.
    """
    if before is None or (before.runs[-1:] and before.runs[-1].endswith(f"from step {before.step}")):
        forget_progress(cell)
    else:
        _write(cell, replace(start, step=before.step, rows=before.rows, seconds=before.seconds))


def _write(cell: Cell, progress: Progress) -> None:
    with written_whole(cell.folder / FILE) as partial:
        partial.write_text(json.dumps(asdict(progress)), encoding="utf-8")


class KeepProgress(pl.Callback):
    """Saves a cell's state while it fits, each time that a twenty-fifth of its steps is done.

    A checkpoint is made when a step ends after which no validation follows, or an epoch. It is made when an epoch ends
    alone, where a training metric is averaged over the epoch, which no checkpoint holds, where Lightning averages
    weights, which a fit that resumes within an epoch does not, or where the module has an `on_train_batch_end`, which
    comes later. None is made where a batch only adds to gradients, where a schedule on a plateau is still to see what
    was logged, or while something that no checkpoint holds is not as it was at the start (:func:`.unsaved_state`);
    where that is so at an epoch's end, none any more. A checkpoint counts from the next step on, when what its own step
    logged is in the log. Without it a cell runs the same, bit by bit.

    Args:
        cell: whose.
        start: how it starts: its step, what was logged before, and its machine as the last of `runs`.
        may_write: called before files are written, and raises where another process runs the cell.
    """

    def __init__(self, cell: Cell, start: Progress, may_write: Callable[[], None]) -> None:
        self._cell, self._start, self._may_write = cell, start, may_write
        self._began = time.monotonic()
        self._every, self._last, self._free = 1, start.step, 0.0
        self._waiting: int | None = None
        self._at_start: dict[str, str] | None = None
        self._before_batch = -1
        self._given_up = False
        self.made = False
        """Whether this process has made a checkpoint that counts."""

    @property
    def seconds(self) -> float:
        """That the cell has run, also before it was killed."""
        return self._start.seconds + time.monotonic() - self._began

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """See steps begin before other callbacks do, and end after them."""
        if stage == "fit":
            callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
            trainer.callbacks = [self, *(each for each in callbacks if each is not self), _AtEnd(self)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the steps to the next checkpoint; there is none where no loader would know its place."""
        start = self._start.fingerprint, self._start.step
        if trainer.world_size > 1 and trainer.strategy.broadcast(start) != start:
            raise RuntimeError(
                "the processes of this cell have different settings, of a file that was edited as they started, or go "
                "on from different checkpoints; start it again"
            )
        steps = trainer.estimated_stepping_batches
        self._every = max(1, int(steps) // _PARTS) if math.isfinite(steps) else 1
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            self._give_up(f"what {type(trainer.strategy).__name__} shards is read by unpickling, which runs code")
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        for finder in (each for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder))):
            self._give_up(f"{type(finder).__name__} begins each fit at its first step")
        loaders = trainer.fit_loop._combined_loader
        for loader in loaders.flattened if loaders is not None else ():
            if not hasattr(loader, "load_state_dict"):
                self._give_up(f"{type(loader).__name__} has no place to go on from, as ResumableLoader has")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the checkpoint of the step before count."""
        self._begin(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Have the checkpoint of the step before count."""
        self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        self._publish(trainer)
        self._before_batch = trainer.global_step
        if self._at_start is None and not self._given_up:  # a fit that resumes within an epoch has no start of one
            self._at_start = unsaved_state(trainer)

    def at_end_of_step(self, trainer: pl.Trainer) -> None:
        """Make a checkpoint within an epoch, where one is due."""
        loop = trainer.fit_loop.epoch_loop
        ends = loop._num_ready_batches_reached() or loop._is_training_done or loop._should_accumulate()
        averages = any(result.meta.on_epoch for result in loop._results.values())
        later = is_overridden("on_train_batch_end", trainer.lightning_module)
        fetcher = trainer.fit_loop._data_fetcher
        averages |= any(isinstance(each, StochasticWeightAveraging) for each in vars(trainer)["callbacks"])
        if ends or averages or later or fetcher is None or loop._should_check_val_fx(fetcher):
            return
        self.save(trainer, "step")

    def save(self, trainer: pl.Trainer, interval: str) -> None:
        """Make a checkpoint at the end of a "step" or an "epoch", where one is due."""
        if trainer.global_step - self._last < self._every:
            return
        if not _agreed(trainer, not self._given_up and time.monotonic() >= self._free):
            return
        adds = trainer.global_step == self._before_batch  # to gradients, which no checkpoint holds
        schedules = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if adds or any(config.interval == interval for config in schedules):
            return
        step, began = trainer.global_step, time.monotonic()
        changed = changed_sources(self._at_start or {}, unsaved_state(trainer))
        if not _agreed(trainer, not changed):
            if interval == "epoch":
                names = ", ".join(changed[:5]) or "what another process holds"
                self._give_up(f"it would not hold {names}, which changed while it trained")
            self._free = time.monotonic() + _PAUSE * (time.monotonic() - began)
            return
        path = checkpoint_of(self._cell, step)
        try:
            trainer.save_checkpoint(path)
            if not self.made and trainer.is_global_zero:
                read_checkpoint(path)
        except (OSError, ValueError) as error:
            self._give_up(reason(error))
            if not path.exists():  # the others wait where it would have been written
                trainer.strategy.barrier()
            return
        self._last, self._waiting = step, step
        self._free = time.monotonic() + _PAUSE * (time.monotonic() - began)

    def _give_up(self, why: str) -> None:
        print(f"attnswap: a killed cell starts anew, as no checkpoint can be kept: {why}", file=sys.stderr)
        self._given_up = True

    def _publish(self, trainer: pl.Trainer) -> None:
        step, self._waiting = self._waiting, None
        if step is None or not trainer.is_global_zero:
            return
        self._may_write()
        _write(self._cell, replace(self._start, step=step, seconds=round(self.seconds, 1), rows=self.rows(trainer)))
        self.made = True
        kept = checkpoint_of(self._cell, step)
        for path in self._cell.folder.glob("progress-*.ckpt"):
            if path != kept:
                path.unlink(missing_ok=True)

    def rows(self, trainer: pl.Trainer) -> Rows:
        """What the cell has logged, also before it was killed."""
        (logger, *_) = loggers_named(trainer, "CSVLogger")
        logger.save()
        log = Path(logger.log_dir, "metrics.csv")
        return self._start.rows + (read_metrics(log) if log.is_file() else [])


def _agreed(trainer: pl.Trainer, own: bool) -> bool:
    """Whether all processes say so: all make a checkpoint, or none."""
    return own if trainer.world_size == 1 else bool(trainer.strategy.reduce_boolean_decision(own))


class _AtEnd(Checkpoint):
    """Tells of the ends of steps and epochs, after all other callbacks, as Lightning orders those that save.

    To others it is a callback that has saved nothing.
    """

    best_model_path, last_model_path, best_model_score, monitor = "", "", None, None

    def __init__(self, progress: KeepProgress) -> None:
        self._progress = progress

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._progress.at_end_of_step(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._progress.save(trainer, "epoch")
