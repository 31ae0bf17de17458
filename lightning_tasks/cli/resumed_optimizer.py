"""The optimizer of a run that resumes: it goes on as the checkpoint has it, so nothing else may be asked for.

Lightning restores the optimizer and the schedule whole, their settings with them (`lr`, `weight_decay`, `T_max`).
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_tasks.callbacks.base import Callback
from lightning_tasks.files.other_settings import RESUME_CURE, WEIGHTS_ONLY

_MOVED_BY_SCHEDULES = ("lr", "momentum", "betas")


class CheckResumedOptimizer(Callback):
    """Compares the optimizers of any module with those that a checkpoint is about to put in their place.

    Where they cannot be restored, the run is refused before it writes anything. Where hyper-parameters changed and the
    optimizer goes on with other numbers than they give it, that is a warning.

    Raises:
        ValueError: on start, if the optimizers are of another kind, or have other groups of parameters, or a callback
            begins each fit at its first step.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._stored: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what tries steps before the first one, and forgets the checkpoint's optimizer and step with them."""
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        finders = [type(each).__name__ for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder))]
        if finders:
            raise ValueError(
                f"{finders[0]} begins each fit at its first step, and --ckpt_path goes on from the checkpoint's: take "
                f"it out of trainer.callbacks and set what it found, or {WEIGHTS_ONLY}"
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is to be compared once the optimizers are there."""
        self._states = checkpoint.get("optimizer_states") or []
        self._stored = dict(checkpoint.get("hyper_parameters") or {})

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare; by now the optimizers are built and not yet restored."""
        states, self._states = self._states, []
        if not states or trainer.ckpt_path is None:
            return
        if len(states) != len(trainer.optimizers):
            raise ValueError(
                f"the checkpoint cannot be resumed: it holds the state of {len(states)} optimizers, and "
                f"{type(pl_module).__name__} has {len(trainer.optimizers)}. {RESUME_CURE}"
            )
        now = dict(pl_module.hparams)
        changed = any(name in self._stored and self._stored[name] != value for name, value in now.items())
        for optimizer, state in zip(trainer.optimizers, states, strict=True):
            _refuse_other_groups(optimizer, state)
            if changed:
                _warn_of_other_numbers(optimizer, state)


def _refuse_other_groups(optimizer: Optimizer, state: dict[str, Any]) -> None:
    name, before = type(optimizer).__name__, state.get("param_groups", [])
    sizes = [len(group["params"]) for group in before], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoint cannot be resumed: its optimizer has groups of {sizes[0]} parameters, and {name} now has "
            f"groups of {sizes[1]}. {RESUME_CURE}"
        )
    for old, new in zip(before, optimizer.param_groups, strict=True):
        # What an optimizer is built with; schedules add keys of their own, and a later torch has further ones.
        missing = sorted(optimizer.defaults.keys() - old.keys())
        strange = sorted(old.keys() - new.keys() - {"initial_lr"})
        if missing and strange:
            raise ValueError(
                f"the checkpoint cannot be resumed: its optimizer (with {', '.join(strange)}) is none of the kind "
                f"{name} (with {', '.join(missing)}). {RESUME_CURE}"
            )


def _warn_of_other_numbers(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for old, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
        scheduled = "initial_lr" in new or "initial_lr" in old
        for key in sorted(old.keys() & new.keys() - {"params"} - set(_MOVED_BY_SCHEDULES if scheduled else ())):
            if isinstance(old[key], (int, float)) and old[key] != new[key]:
                rank_zero_warn(
                    f"--ckpt_path: {type(optimizer).__name__} goes on with {key} {old[key]!r} of the checkpoint, not "
                    f"with {new[key]!r} as configured. To start from the weights with it, give --init_from instead"
                )
