"""Callbacks of ours in the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as pl

from attention_modules.extras import needed_for
from attention_modules.hosts.huggingface.saving import write_card
from lightning_tasks.integrations.loop import Loop

with needed_for("attnswap.integrations.transformers", "hf"):
    from transformers import Trainer, TrainerCallback


class Watch(TrainerCallback):
    """Runs monitors, regularizers and stabilizers of :mod:`attnswap.callbacks` in a Trainer of transformers.

    What they log is logged by the Trainer, so that its history and its reporters (W&B, TensorBoard) have it. The
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
        train, create_card = trainer.train, trainer.create_model_card

        @wraps(train)
        def train_and_leave(*args: Any, **kwargs: Any) -> Any:
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
        self._loop = Loop(kwargs["model"], self._callbacks, self._log, [optimizer], accumulate, scaler).__enter__()
        self._loop.fit_loop.epoch_loop._batches_that_stepped = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step of an epoch may have fewer batches, and the loss is divided by their number."""
        if self._loop is not None:
            self._loop.accumulate_grad_batches = self._trainer.current_gradient_accumulation_steps

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End."""
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(type(error) if error else None, error, None)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._trainer.log(dict(values))
