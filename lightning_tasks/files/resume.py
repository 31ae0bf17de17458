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


def keep_state(trainer: pl.Trainer | None, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Keep in a checkpoint what :func:`go_on` goes on with; all processes must call this."""
    checkpoint.setdefault("random_states", gather_random_states(pl_module.device))
    if trainer is None:
        return
    if "metrics" not in checkpoint:
        metrics = {name: each for name, each in trainer.callback_metrics.items() if isinstance(each, (Tensor, float))}
        own = {name: torch.as_tensor(each).detach().cpu() for name, each in metrics.items()}
        checkpoint |= {"metrics": of_all(own), "logged": of_all(logged(trainer))}
    if lost := _gathered(trainer, pl_module):
        checkpoint["lost_gradients"] = lost
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batch.completed < batch.processed:
        checkpoint["open_batch"] = True
    if _of_kind(trainer, "BaseFinetuning"):
        checkpoint["finetuning"] = {
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
    kept = {name: checkpoint[name] for name in _IS_KEPT if name in checkpoint}
    for name, value in kept.items():
        if not _IS_KEPT[name](value):
            raise ValueError(f"the checkpoint's {name} are none that attnswap saves, but {value!r:.80}: {WEIGHTS_ONLY}")
    _reopen_cut_epoch(checkpoint)
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

    Where ``configure_optimizers`` reads ``trainer.estimated_stepping_batches``, Lightning makes the loaders before it
    reads the checkpoint, and would not tell them their place afterwards; later hooks may read it, too. Here the loaders
    are made anew at the last moment. A fit that `max_steps` alone ends would resume at the end of an epoch with a step
    that belongs to no epoch. What follows a checkpoint is done: behind a batch the validation that was due, behind an
    epoch a step of `ReduceLROnPlateau` and the hooks at the start of the next, by the metrics of before; Lightning
    would leave it out. Within an epoch `GradientAccumulationScheduler` would not act, and `BaseFinetuning` freezes what
    it had let train.

    Args:
        trainer: of the fit.
        pl_module: its module.
        kept: what :func:`kept_state` gives.
    """
    loop = trainer.fit_loop
    of_epoch = loop.epoch_loop

    def of_rank(name: str) -> dict[str, Any]:
        found = kept.get(name) or [{}]
        return found[trainer.global_rank if trainer.global_rank < len(found) else 0]

    def advance(*arguments: Any) -> None:
        del of_epoch.advance  # type: ignore[method-assign]
        loop._restarting = False
        if kept.get("open_batch"):  # the batch ends with what comes after an advance
            of_epoch.val_loop.restarting = False
        else:
            of_epoch.advance(*arguments)

    def begin() -> None:
        del loop.on_advance_start  # type: ignore[method-assign]
        if loop.restarted_mid_epoch:
            if len(kept.get("logged", ())) == trainer.world_size:
                log_again(trainer, of_rank("logged"))
            for scheduler in _of_kind(trainer, "GradientAccumulationScheduler"):
                scheduler.on_train_epoch_start(trainer, pl_module)
            if lost := kept.get("lost_gradients"):
                rank_zero_warn(
                    f"the checkpoint was saved behind {lost} of the batches that a step accumulates, and lacks their "
                    "gradients, so that this run will differ from one that was not stopped: save where steps end "
                    "(every_n_train_steps, or val_check_interval a multiple of accumulate_grad_batches)"
                )
        loop.on_advance_start()

    def run() -> None:
        del loop.run  # type: ignore[method-assign]
        if (before := kept.get("finetuning")) is not None and _of_kind(trainer, "BaseFinetuning"):
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(before["trains"].get(name, parameter.requires_grad))
            for name, norm in _norms(pl_module):
                norm.track_running_stats = before["tracks"].get(name, norm.track_running_stats)
        loop._combined_loader = None
        trainer.callback_metrics.update(of_rank("metrics"))
        epoch: Any = loop.epoch_progress.current
        if epoch.ready == epoch.started == epoch.processed:
            loop._restarting = of_epoch.restarting = False
            monitored = {each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau}
            known = monitored <= trainer.callback_metrics.keys()  # not by a checkpoint of an earlier version
            if known and epoch.completed < epoch.processed and of_epoch._num_ready_batches_reached():
                of_epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        of_epoch.advance = advance  # type: ignore[method-assign, assignment]
        loop.on_advance_start = begin  # type: ignore[method-assign]
        loop.run()

    loop.run = run  # type: ignore[method-assign]
    if (states := kept.get("random_states")) is not None:
        set_random_state(states, trainer.global_rank, pl_module.device)


def _reopen_cut_epoch(checkpoint: dict[str, Any]) -> None:
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
    for count in (batches["total"], batches["current"]) if checkpoint.get("open_batch") else ():
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
