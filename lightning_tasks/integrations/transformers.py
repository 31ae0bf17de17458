"""Callbacks of ours in the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from attention_modules.extras import needed_for
from attention_modules.hosts.huggingface.saving import write_card
from lightning_tasks.integrations.loop import STEP, Loop

with needed_for("attnswap.integrations.transformers", "hf"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint


_STATES = "attnswap_callbacks.pt"


class Watch(TrainerCallback):
    """Runs monitors, regularizers and stabilizers of :mod:`attnswap.callbacks` in a Trainer of transformers.

    What they log is logged by the Trainer, so that its history and its reporters (W&B, TensorBoard) have it. What they
    keep for a run that resumes is a file ``attnswap_callbacks.pt`` in the Trainer's checkpoints. The
    Trainer's model card names what was swapped in the model.

    Args:
        trainer: in which it runs.
        callbacks: what runs, as ``AttentionMonitor(100)`` or ``LocAteR(1e-3)``.

    Raises:
        ValueError: when training starts, as the callbacks do when a fit starts.

    Example:
        >>> from attnswap.callbacks import AttentionMonitor
        >>> from attnswap.integrations.transformers import Watch
        >>> trainer.add_callback(Watch(trainer, AttentionMonitor(every_n_steps=100)))  # doctest: +SKIP
    """

    def __init__(self, trainer: Trainer, *callbacks: pl.Callback) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self._loop: Loop | None = None
        self._from: str | None = None  # the checkpoint that training goes on from
        train, create_card = trainer.train, trainer.create_model_card

        @wraps(train)
        def train_and_leave(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get("resume_from_checkpoint")
            self._from = get_last_checkpoint(trainer.args.output_dir) if given is True else given
            try:
                return train(*args, **kwargs)
            except BaseException as error:  # of which a Trainer tells no callback
                self._leave(error)
                raise

        @wraps(create_card)
        def create_and_name_swap(*args: Any, **kwargs: Any) -> None:
            create_card(*args, **kwargs)
            if trainer.is_world_process_zero():
                write_card(trainer.model, trainer.args.output_dir)

        trainer.train, trainer.create_model_card = train_and_leave, create_and_name_swap  # type: ignore[method-assign]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        self._leave()
        optimizer = kwargs["optimizer"]
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        accumulate = args.gradient_accumulation_steps
        loop = Loop(kwargs["model"], self._callbacks, self._log, [optimizer], accumulate, scaler)
        states = _read(Path(self._from) / _STATES) if self._from else {}
        loop.load_state_dict(states | {STEP: state.global_step})
        self._loop = loop.__enter__()
        if self._from and not states and loop.callback_states():
            rank_zero_warn(f"{self._from} has no {_STATES}: callbacks begin anew, as with the means that LocAteR holds")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step of an epoch may have fewer batches, and the loss is divided by their number."""
        if self._loop is not None:
            self._loop.accumulate_grad_batches = self._trainer.current_gradient_accumulation_steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the callbacks' states beside the Trainer's."""
        if self._loop is not None and args.should_save and (states := self._loop.callback_states()):
            folder = self._trainer._get_output_dir(getattr(self._trainer, "_trial", None))  # of a search's trial, too
            file = Path(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", _STATES)
            if file.parent.is_dir():
                torch.save(_read(file) | states, file)  # another Watch may have written it

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End."""
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(type(error) if error else None, error, None)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._trainer.log(dict(values))


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}
