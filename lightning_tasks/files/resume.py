"""What a checkpoint keeps beside Lightning's own, for a run that goes on where another stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_tasks.files.logged import is_logged, log_again, logged
from lightning_tasks.files.random_states import gather_random_states, of_all, set_random_state
from lightning_tasks.files.weights import WEIGHTS_ONLY

_KEY = "attnswap_resume"


def keep_state(trainer: pl.Trainer | None, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Keep in a checkpoint what :func:`go_on` goes on with; all processes must call this."""
    if _KEY in checkpoint:  # by a callback, before the task
        return
    kept = checkpoint[_KEY] = {"random_states": gather_random_states(pl_module.device)}
    if trainer is None:
        return
    numbers = {name: each for name, each in trainer.callback_metrics.items() if isinstance(each, (Tensor, float))}
    metrics = {
        name: torch.as_tensor(each, dtype=getattr(each, "dtype", torch.float64)) for name, each in numbers.items()
    }
    kept["metrics"] = of_all({name: each.detach().cpu() for name, each in metrics.items()})
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if batch.ready == batch.processed:  # else one has failed, of which something may be logged
        kept["logged"] = of_all(logged(trainer))
    if batch.completed < batch.processed and epoch.processed < epoch.started:
        kept["open_batch"] = True
    if lost := _gathered(trainer, pl_module):
        kept["lost_gradients"] = lost
    if _of_kind(trainer, "BaseFinetuning"):
        kept["finetuning"] = {
            "trains": {name: each.requires_grad for name, each in pl_module.named_parameters()},
            "tracks": {name: bool(each.track_running_stats) for name, each in _norms(pl_module)},
        }


def _gathered(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int:
    """How many batches a step has gathered gradients of, which is not taken yet."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_open = pl_module.automatic_optimization and not progress.is_last_batch
    return int(progress.current.processed % trainer.accumulate_grad_batches) if is_open else 0


def _norms(pl_module: pl.LightningModule) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in pl_module.named_modules() if hasattr(each, "track_running_stats")]


def kept_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What :func:`keep_state` kept in a checkpoint, in which an epoch that was cut short is opened again.

    Raises:
        ValueError: for an entry that it never writes.
    """
    kept = checkpoint.get(_KEY, {})
    for name, value in kept.items() if isinstance(kept, dict) else [(_KEY, kept)]:
        if name not in _IS_KEPT or not _IS_KEPT[name](value):
            raise ValueError(f"the checkpoint's {name} are none that attnswap saves, but {value!r:.80}: {WEIGHTS_ONLY}")
    _reopen_cut_epoch(checkpoint, kept)
    return kept


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(each, kind) for each in values)


_IS_KEPT: dict[str, Callable[[Any], bool]] = {
    "random_states": lambda value: _are(list, value) and all(each and _are(Tensor, each) for each in value),
    "finetuning": lambda value: (
        isinstance(value, dict)
        and value.keys() == {"trains", "tracks"}
        and _are(dict, [*value.values()])
        and all(_are(bool, [*each.values()]) for each in value.values())
    ),
    "metrics": lambda value: _are(dict, value) and all(_are(Tensor, [*each.values()]) for each in value),
    "logged": lambda value: _are(dict, value) and all(is_logged(each) for held in value for each in held.values()),
    "lost_gradients": lambda value: isinstance(value, int),
    "open_batch": lambda value: isinstance(value, bool),
}


def _of_kind(trainer: pl.Trainer, name: str) -> list[Any]:
    """The callbacks of a class of Lightning's, of either package."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
    return [each for each in callbacks if name in (kind.__name__ for kind in type(each).__mro__)]


def go_on(trainer: pl.Trainer, pl_module: pl.LightningModule, kept: Mapping[str, Any]) -> None:
    """Begin a resumed fit with the random state of this process, and at its place in the data.

    Lightning alone differs from a run that was not stopped where

    - ``configure_optimizers`` or a later hook reads ``trainer.estimated_stepping_batches``: the loaders that it makes
      then are not told their place;
    - `max_steps` alone ended the fit: at an epoch's end it takes a step that belongs to no epoch;
    - something follows the checkpoint: a validation that was due, a step of `ReduceLROnPlateau`, the hooks at the start
      of an epoch;
    - the checkpoint is of a place within an epoch: `GradientAccumulationScheduler` does not act, and `BaseFinetuning`
      freezes what it had let train.

    What loaders draw when they are made, they draw as in a fit that begins; the random state goes on behind that.

    Args:
        trainer: of the fit; where it does not resume, nothing is done.
        pl_module: its module.
        kept: what :func:`kept_state` gives.
    """
    if isinstance(getattr(trainer.fit_loop.run, "__self__", None), _Resumed):  # of a fit that ended before it ran
        del trainer.fit_loop.run
    if trainer.ckpt_path is not None:  # else the checkpoint was loaded as a start for another fit
        trainer.fit_loop.run = _Resumed(trainer, pl_module, kept).run  # type: ignore[method-assign]


class _Resumed:
    """What acts in place of parts of Lightning's loops, each once: the run, the start of an epoch, the first batch."""

    def __init__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, kept: Mapping[str, Any]) -> None:
        self.trainer, self.module, self.kept = trainer, pl_module, kept
        self.loop: Any = trainer.fit_loop
        self.of_epoch: Any = self.loop.epoch_loop

    def run(self) -> None:
        loop, of_epoch, trainer = self.loop, self.of_epoch, self.trainer
        del loop.run
        if (before := self.kept.get("finetuning")) is not None and _of_kind(trainer, "BaseFinetuning"):
            self._let_train(before)
        epoch = loop.epoch_progress.current
        is_between = epoch.ready == epoch.started == epoch.processed  # one epoch and the next
        self._set_up_data(is_between)
        of_epoch.val_loop._has_run = False  # in an earlier fit of this trainer
        trainer.callback_metrics.update(self._of_rank("metrics"))
        if is_between:
            loop._restarting = of_epoch.restarting = False
            if epoch.completed < epoch.processed:
                self._step_plateaus()
        of_epoch.advance, loop.on_advance_start = self._advance, self._begin
        try:
            loop.run()
        finally:  # what the run did not come to
            for owner, name in ((of_epoch, "advance"), (loop, "on_advance_start")):
                vars(owner).pop(name, None)

    def _set_up_data(self, is_between: bool) -> None:
        """Set the random state behind the making of loaders, and between epochs before the iterators, which draw."""
        loop, load = self.loop, self.loop._load_combined_loader_states
        is_placed: list[bool] = []

        def place() -> None:
            is_placed.append(True)
            if is_between:
                self._set_random_state()
            load()

        loop._load_combined_loader_states = place
        try:
            loop.setup_data()
        finally:
            del loop._load_combined_loader_states
        if not is_placed:  # there were loaders already, whose iterators have begun, or there are none
            place()
            if loop._combined_loader is not None:
                iter(loop._data_fetcher)
        if not is_between:
            self._set_random_state()

    def _set_random_state(self) -> None:
        if (states := self.kept.get("random_states")) is not None:
            set_random_state(states, self.trainer.global_rank, self.module.device)

    def _let_train(self, before: Mapping[str, Any]) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(before["trains"].get(name, parameter.requires_grad))
        for name, norm in _norms(self.module):
            norm.track_running_stats = before["tracks"].get(name, norm.track_running_stats)

    def _of_rank(self, name: str) -> dict[str, Any]:
        found, rank = self.kept.get(name) or [{}], self.trainer.global_rank
        return found[rank if rank < len(found) else 0]

    def _step_plateaus(self) -> None:
        """Behind an epoch whose checkpoint came before its schedules that monitor something."""
        plateaus = [each for each in self.trainer.lr_scheduler_configs if each.reduce_on_plateau]
        monitored = {each.monitor for each in plateaus if each.strict}
        if self.of_epoch._num_ready_batches_reached() and monitored <= self.trainer.callback_metrics.keys():
            self.of_epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def _begin(self) -> None:
        loop, trainer = self.loop, self.trainer
        del loop.on_advance_start
        epoch = loop.epoch_progress.current
        if loop.restarted_mid_epoch and epoch.processed == epoch.started:  # as Lightning counts one that is over
            loop.reset_restart_stage()
        if loop.restarted_mid_epoch:
            if len(self.kept.get("logged", ())) == trainer.world_size:
                log_again(trainer, self._of_rank("logged"))
            for scheduler in _of_kind(trainer, "GradientAccumulationScheduler"):
                scheduler.on_train_epoch_start(trainer, self.module)
            if lost := self.kept.get("lost_gradients"):
                rank_zero_warn(
                    f"the checkpoint was saved behind {lost} of the batches that a step accumulates, and lacks their "
                    "gradients, so that this run will differ from one that was not stopped: save where steps end, as "
                    "with every_n_train_steps"
                )
        loop.on_advance_start()

    def _advance(self, *arguments: Any) -> None:
        del self.of_epoch.advance
        self.loop._restarting = False
        if self.kept.get("open_batch"):  # the batch ends with what comes after an advance
            self.of_epoch.val_loop.restarting = False
        else:
            self.of_epoch.advance(*arguments)


def _reopen_cut_epoch(checkpoint: dict[str, Any], kept: Mapping[str, Any]) -> None:
    """Make a fit that resumes finish the epoch that `max_steps` cut short, and give one that was about to start whole.

    Lightning counts the first as processed, so it would give the rest of its steps the data of the next one. Of a
    checkpoint that is saved in `on_train_epoch_start` it has the batches of the epoch before, and leaves out those of
    the new one.
    """
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    batches = fit.get("epoch_loop.batch_progress", {})
    epochs = fit.get("epoch_progress", {})
    if not batches or not batches["current"]["ready"]:
        return
    for count in (batches["total"], batches["current"]) if kept.get("open_batch") else ():
        count["completed"] = count["processed"]
    if batches["is_last_batch"]:
        for count in (epochs["total"], epochs["current"]):
            if count["started"] == count["completed"]:
                count["ready"] = count["completed"]
        return
    for count in (epochs["total"], epochs["current"]):
        if count["completed"] == count["started"]:  # saved when the fit was over
            count["completed"] -= 1
        if count["processed"] > count["completed"]:
            count["processed"] -= 1
