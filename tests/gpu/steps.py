"""Training steps in which the host may not wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from attnswap import callbacks
from lightning_tasks import LanguageModelingTask
from tests.lightning_tasks.callbacks.modules import TOKENS, VOCABULARY, batches

RARELY = 1_000  # a monitor that looks at the first step alone: reading what it logs is its to do
CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "AttentionDiversification": lambda: callbacks.AttentionDiversification(weight=0.1),
    "AttentionMonitor": lambda: callbacks.AttentionMonitor(stages=["train"], every_n_steps=RARELY),
    "DAMPenalty": callbacks.DAMPenalty,
    "EntropyRegularizer": lambda: callbacks.EntropyRegularizer(weight=0.1, floor=0.5),
    "FreezeQK": lambda: callbacks.FreezeQK(layers=[0]),
    "LocAteR": lambda: callbacks.LocAteR(weight=0.1),
    "LogitMonitor": lambda: callbacks.LogitMonitor(every_n_steps=RARELY),
    "NonFiniteGuard": callbacks.NonFiniteGuard,
    "PursuitMonitor": callbacks.PursuitMonitor,
    "QKClip": lambda: callbacks.QKClip(tau=100.0, every_n_steps=RARELY),
    "QKWeightDecay": lambda: callbacks.QKWeightDecay(weight_decay=0.1),
    "SigmaReparam": callbacks.SigmaReparam,
    "SpectrumMonitor": lambda: callbacks.SpectrumMonitor(every_n_steps=RARELY),
}
MECHANISM = {"DAMPenalty": "dam", "PursuitMonitor": "rpc"}  # the others watch softmax


SIZES = {"num_layers": 2, "dim": 16, "num_heads": 2, "mlp_dim": 16, "num_tokens": TOKENS, "dropout": 0.0}


def task() -> LanguageModelingTask:
    """A small language model of our own layers; PyTorch's `TransformerEncoder` waits, to see if a mask is causal."""
    model = {"class_path": "lightning_tasks.models.TransformerLM", "init_args": SIZES}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "fused": True}}
    return LanguageModelingTask(model, vocab_size=VOCABULARY, optimizer=optimizer)


class _Opens(pl.Callback):
    def __init__(self, watch: Callable[[], AbstractContextManager[Any]]) -> None:
        self.watch, self.steps = watch, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step:  # the first step warms up
            self.opened = self.watch()
            self.opened.__enter__()


class _Closes(pl.Callback):
    def __init__(self, opens: _Opens) -> None:
        self.opens = opens

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step > 1:
            self.opens.opened.__exit__(None, None, None)
            self.opens.steps += 1

    def on_exception(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step:
            self.opens.opened.__exit__(None, None, None)


def watched_fit(
    watch: Callable[[], AbstractContextManager[Any]], given: list[pl.Callback], **trainer_options: Any
) -> int:
    """Train a small language model, every step but the first inside `watch()`; returns how many these were."""
    opens = _Opens(watch)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    order = [opens, *given, _Closes(opens)]
    pl.Trainer(**{**options, **quiet, **trainer_options}, callbacks=order).fit(task(), batches(4))
    return opens.steps
