"""A guard against losses and gradients that are NaN or infinite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from attention_modules.mechanisms.shared.options import check_flag, check_integer
from lightning_tasks.callbacks.base import (
    Callback,
    StepArguments,
    behind_closure,
    calls_step_hooks,
    gives_up_gradients,
    is_strategy,
)
from lightning_tasks.callbacks.locater import LocAteR
from lightning_tasks.files.random_states import random_state
from lightning_tasks.runs.divergence import SKIPPED, STOPPED
from lightning_tasks.runs.files import run_folder
from lightning_tasks.runs.loggers import current_step
from lightning_tasks.runs.wandb_runs import alert
from lightning_tasks.training.non_finite import (
    Flags,
    NonFiniteError,
    Sample,
    dataset_indices,
    described,
    listed,
    local_part,
    save_sample,
)

_ACTIONS = ("stop", "skip")
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy")
_MOST_SAVED = 10
_SCALER_PATIENCE = 20  # halvings of the loss scale in a row, a factor of a million: no scale helps


class _Window:
    """The batches since the last optimizer step, of which the first with something that is not finite is kept."""

    def __init__(self) -> None:
        self.suspect: Sample | None = None
        self._last: tuple[Flags, Sample] | None = None

    def add(self, flags: Flags, sample: Sample) -> None:
        """Add a batch that no step followed."""
        self.settle()
        self._last = flags, sample

    def settle(self) -> None:
        """Look at the batch that was added last, whose flags are read one batch late."""
        if self._last is not None and self.suspect is None:
            flags, sample = self._last
            loss, parameters = flags.read()
            self.suspect = sample if loss or parameters else None
        self._last = None


def _settings(optimizer: Optimizer) -> list[dict[str, tuple[Any, Tensor | None]]]:
    """What groups hold beside Parameters; of tensors, the numbers too."""
    return [
        {
            name: (value, value.detach().clone() if isinstance(value, Tensor) else None)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def _put_back(groups: list[dict[str, tuple[Any, Tensor | None]]], optimizer: Optimizer) -> None:
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        for name in group.keys() - before.keys() - {"params"}:
            del group[name]
        for name, (value, numbers) in before.items():
            group[name] = value if numbers is None else value.copy_(numbers)


class NonFiniteGuard(Callback):
    """Stops at the first loss or gradient that is NaN or infinite, or skips its step, and saves the batch.

    It looks at the loss of each backward pass and at the gradients before each optimizer step, with automatic and
    manual optimization. The error, and the file that the batch is in, name the step, the batch (with accumulation the
    one of the window), its indices in the data set where the order of the loader tells them, the loss, and the
    parameters whose gradient is not finite. It moves behind ``LocAteR``, which adds to gradients; place it after other
    callbacks that do.

    ``"stop"`` raises :class:`~lightning_tasks.training.non_finite.NonFiniteError`. On the CPU that is before the
    optimizer steps. On CUDA devices nothing waits for the device: what was found at a step is read at the next one, and
    before each validation and checkpoint, so that no checkpoint has such weights; those in memory took that one step.
    ``"skip"`` leaves the step out: parameters and optimizer state stay, the schedule goes on. On devices it waits for
    the gradients at each step, as ``torch.amp.GradScaler`` does. Buffers that the forward pass writes (running means
    of batch norm) are not protected, nor are u and v of ``SigmaReparam``, which move before it. Steps that
    were skipped are logged as ``non_finite/skipped``.

    With fp16 mixed precision gradients that overflow are the scaler's, which skips such steps itself; the guard acts
    where the loss is not finite, and where 20 steps in a row overflowed. On several processes the gradients alone
    decide, which are the same on all: a loss that is not finite but has finite gradients stops nothing there.

    Args:
        action: ``"stop"`` or ``"skip"``.
        save_batch: whether the batch is saved, on every process, as ``non_finite_step_N.pt`` (of the first 10 that are
            skipped), with the random states before it; ``torch.load(path, weights_only=True)`` reads it.
        folder: where to; where None, into the run's folder, and nowhere if the run has none.
        max_consecutive_skips: as many steps in a row are skipped at most; the next one stops the run.

    Raises:
        ValueError: if an argument is none of these; at the start, if the strategy is DeepSpeed, which keeps gradients
            in buffers of its own.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from attnswap.callbacks import NonFiniteGuard
        >>> trainer = Trainer(callbacks=[NonFiniteGuard(action="skip")], logger=False)
    """

    def __init__(
        self,
        action: Literal["stop", "skip"] = "stop",
        save_batch: bool = True,
        folder: str | None = None,
        max_consecutive_skips: int = 10,
    ) -> None:
        super().__init__()
        if action not in _ACTIONS:
            raise ValueError(f"action must be one of {', '.join(map(repr, _ACTIONS))}, got {action!r}")
        self.action = action
        self.save_batch = check_flag("save_batch", save_batch)
        self.folder = folder
        self.max_consecutive_skips = check_integer("max_consecutive_skips", max_consecutive_skips, 1)
        self.skipped = 0
        self._in_a_row = 0
        self._hooks: list[RemovableHandle] = []  # of a batch's steps
        self._reset()

    def _reset(self) -> None:
        self._sample: Sample | None = None
        self._judged: list[Tensor] | None = None  # the losses of the batch's last step
        self._window = _Window()
        self._stepped = False
        self._first_of_epoch: int | None = None
        self._unread: tuple[Flags, Sample, _Window] | None = None
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._skips: Optimizer | None = None  # whose next step is left out
        self._seen: set[int] = set()  # optimizers whose gradients are judged for the step that comes
        self._before: dict[int, Any] = {}  # settings, before the last step, if that is left out

    def state_dict(self) -> dict[str, Any]:
        """Nothing of a run in which nothing was skipped."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row} if self.skipped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and is_strategy(trainer, "DeepSpeedStrategy"):
            raise ValueError("NonFiniteGuard: DeepSpeed keeps gradients in its own buffers; use DDP, or no guard")
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # not declared there
        last = max((at for at, each in enumerate(callbacks) if isinstance(each, LocAteR)), default=0)
        own = next((at for at, each in enumerate(callbacks) if each is self), last)
        if own < last:  # a new list, as the old one is being walked through
            before, behind = callbacks[: last + 1], callbacks[last + 1 :]
            trainer.callbacks = [*before[:own], *before[own + 1 :], self, *behind]  # type: ignore[attr-defined]
        self.skipped = self._in_a_row = 0
        self._reset()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.action == "skip" and any(isinstance(each, LBFGS) for each in trainer.optimizers):
            raise ValueError(
                "NonFiniteGuard cannot skip a step of LBFGS, which has moved the weights before it computes the loss "
                "again: give action='stop'"
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_of_epoch = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first_of_epoch is None:
            self._first_of_epoch = batch_idx
        self._stepped = False
        place = current_step(trainer), trainer.current_epoch, batch_idx
        self._sample = Sample(*place, batch, random_state(pl_module.device))
        self._judged = None
        self._unhook()
        for optimizer in filter(calls_step_hooks, trainer.optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, trainer, pl_module)))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(self._hooks[-1].id, last=False)  # before anybody's

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if gives_up_gradients(pl_module):  # those that no step has taken in
            self._window = _Window()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._seen.clear()  # as of a step that ended in an error
        if self._sample is not None:
            self._sample.losses.append(loss.detach().sum())  # a scalar, unless the module gave its gradient

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge a step, and skip it or stop; steps of optimizers that Lightning does not wrap come here, too."""
        self._skips = None
        self._seen.add(id(optimizer))
        self._before.pop(id(optimizer), None)
        if self._sample is None:
            return
        self._settle(trainer, pl_module)
        shared = is_strategy(trainer, *_SHARDED)
        if self._judged is not None and not self._sample.losses:  # all backward passes came before the steps
            self._sample = replace(self._sample, losses=self._judged)
        found = Flags(self._sample.losses, _parameters_of(optimizer), shared), self._sample, self._window
        self._judged = self._sample.losses
        self._sample = replace(self._sample, losses=[])  # a later step of the batch has losses of its own
        self._window, self._stepped = _Window(), True
        if self.action == "stop" and reads_late(pl_module):
            self._unread = found
        elif self._judge(trainer, pl_module, *found):
            self._skips = optimizer

    def _before_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> StepArguments:
        return behind_closure(args, kwargs, partial(self._reach, trainer, pl_module, optimizer))

    def _reach(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """What is there right before the update, when all others have set the groups."""
        if id(optimizer) not in self._seen:
            self.on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._skips is optimizer:  # some count their steps in their groups, with or without gradients
            self._skips = None
            self._before[id(optimizer)] = _settings(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._seen.discard(id(optimizer))
        if (before := self._before.get(id(optimizer))) is not None:  # for the step of a base class, and the one around
            _put_back(before, optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Behind a step: losses of an optimizer that steps in a later batch; to skip it, its gradients are judged.
        if self._sample is not None and self._sample.losses and not (self._stepped and self.action == "skip"):
            flags = Flags(self._sample.losses, list(pl_module.parameters()), shared=False)  # of this process's batch
            self._window.add(flags, self._sample)
        self._sample = None
        self._unhook()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._settle(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._settle(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._reset()

    @rank_zero_only
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.skipped:
            print(f"skipped: {self.skipped} optimizer steps, whose loss or gradient was not finite")

    def _settle(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read what was found at the last step, where that waited."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._judge(trainer, pl_module, *unread)

    def _judge(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, flags: Flags, sample: Sample, window: _Window
    ) -> bool:
        """Stop, or skip the step, where it is not finite; whether it is skipped here, and by no scaler."""
        window.settle()
        bad_loss, parameters = flags.read()
        bad_loss = trainer.world_size == 1 and (bad_loss or _has_bad_loss(window.suspect))
        if not (bad_loss or parameters):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        scaled = _scaler(trainer) is not None
        if scaled and not bad_loss and self._in_a_row < _SCALER_PATIENCE:
            return False  # the scaler skips the step, and halves its scale
        names = _names_of(pl_module, parameters)
        text = self._describe(trainer, pl_module, window.suspect or sample, names, len(flags.parameters))
        if self.action == "stop" or (scaled and not bad_loss) or self._in_a_row > self.max_consecutive_skips:
            self._stop(trainer, text)
        self._skip(trainer, pl_module, flags, text, keeps_gradients=scaled and bool(parameters))
        return not (scaled and parameters)

    def _stop(self, trainer: pl.Trainer, text: str) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({STOPPED: 1.0}, step=current_step(trainer))
        alert("diverged", text)
        trainer.strategy.barrier()  # the first process that ends takes the others with it: all have saved their batch
        row = f"{self._in_a_row} steps in a row were not finite; the last: " if self._in_a_row > 1 else ""
        cure = " (NonFiniteGuard with action='skip' leaves such steps out)" if self.action == "stop" else ""
        raise NonFiniteError(f"{row}{text}{cure}")

    def _skip(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, flags: Flags, text: str, keeps_gradients: bool
    ) -> None:
        self.skipped += 1
        if not keeps_gradients:  # a scaler needs them, and leaves the step out by itself
            for parameter in flags.parameters:
                parameter.grad = None  # optimizers pass over it: neither weight nor state changes
        rank_zero_warn(f"skipped {text}")
        for logger in trainer.loggers:
            logger.log_metrics({SKIPPED: float(self.skipped)}, step=current_step(trainer))

    def _describe(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, sample: Sample, names: list[str], count: int
    ) -> str:
        """What happened, in one line; the batch is saved on the way."""
        scaler = _scaler(trainer)
        factor: float = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        factor /= 1.0 if scaler is None else scaler.get_scale()
        losses = [float(loss) * factor for loss in sample.losses]
        indices = self._indices(trainer, sample)
        said = f"step {sample.step} (epoch {sample.epoch}, batch {sample.batch_idx}): {described(losses, names, count)}"
        broken = [name for name, each in pl_module.named_parameters() if not local_part(each.detach()).isfinite().all()]
        if broken and not reads_late(pl_module):  # late, they may be what this step made of them
            said += f"; parameters were not finite before: {listed(broken)}"
        if indices is not None:
            said += f"; the batch is of the samples {listed(indices)} of the training data"
        return f"{said}; {self._saved(trainer, sample, indices, losses, names)}"

    def _indices(self, trainer: pl.Trainer, sample: Sample) -> list[int] | None:
        loader = trainer.train_dataloader
        if self._first_of_epoch and not (isinstance(loader, DataLoader) and hasattr(loader, "load_state_dict")):
            return None  # resumed within the epoch: such a loader began anew, and its batches are other ones
        return dataset_indices(loader, sample.batch_idx)

    def _saved(
        self, trainer: pl.Trainer, sample: Sample, indices: list[int] | None, losses: list[float], names: list[str]
    ) -> str:
        if not self.save_batch or self.skipped >= _MOST_SAVED:
            return "the batch is not saved"
        folder = _run_folder(trainer) if self.folder is None else Path(self.folder)
        if folder is None:
            return "the batch is not saved, as the run has no folder (give NonFiniteGuard folder=...)"
        rank = f"_rank_{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = folder / f"non_finite_step_{sample.step}{rank}.pt"
        try:
            save_sample(path, sample, indices, losses, names)
        except OSError as error:
            return f"the batch cannot be saved ({error})"
        return f"the batch is in {path}"


def _run_folder(trainer: pl.Trainer) -> Path | None:
    """The run's folder on every process, all of which come here: by the same gradients."""
    try:
        folder = run_folder(trainer)
    except OSError as error:
        rank_zero_warn(f"the run's folder cannot be made: {error}")
        folder = None
    return trainer.strategy.broadcast(folder) if trainer.world_size > 1 else folder


def reads_late(pl_module: pl.LightningModule) -> bool:
    """Whether reading flags at once would wait for the device."""
    return pl_module.device.type == "cuda"


def _has_bad_loss(sample: Sample | None) -> bool:
    return sample is not None and not all(loss.isfinite() for loss in sample.losses)


def _scaler(trainer: pl.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_of(module: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    wanted = {id(parameter) for parameter in parameters}
    return [name for name, parameter in module.named_parameters() if id(parameter) in wanted]
