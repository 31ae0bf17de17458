"""What is measured of a language model: perplexity on the text as it is, and with words swapped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_tasks.robustness.linf import held_still
from lightning_tasks.robustness.word_swap import IGNORED, swap_words
from lightning_tasks.runs.measurements import Advance, Measurement
from lightning_tasks.runs.robustness import GIVES_NAN, Row


@dataclass
class Text:
    """A language model and the windows of the text that it is measured on.

    Args:
        task: gives ln p of every target from ``predict_step((inputs, targets), index)``, 0 where it is -100.
        inputs, targets: ``[N, T]``.
        device: where the model is.
        batch_size: windows at a time.
        seed: of the swap.
    """

    task: Any
    inputs: Tensor
    targets: Tensor
    device: torch.device
    batch_size: int = 100
    seed: int = 0

    def log_probabilities(self, inputs: Tensor, targets: Tensor, advance: Advance) -> Tensor:
        """ln p of every target ``[N, T]``, in nats, float64."""
        with held_still(self.task, gradients=False):
            parts = []
            for index, rows in enumerate(self._slices()):
                batch = (inputs[rows].to(self.device), targets[rows].to(self.device))
                parts.append(self.task.predict_step(batch, index).cpu().double())
                advance(len(parts[-1]) / len(inputs))
        return torch.cat(parts)

    def _slices(self) -> Iterator[slice]:
        for first in range(0, len(self.inputs), self.batch_size):
            yield slice(first, first + self.batch_size)


def perplexity(log_probabilities: Tensor, counted: Tensor) -> tuple[float, int]:
    """exp of the mean of -ln p over the targets that are counted (bool), and how many these are; nan where none is."""
    return (-log_probabilities[counted].mean()).exp().item(), int(counted.sum())


def clean_text_measurement(text: Text) -> Measurement[Row]:
    """Perplexity of the text as it is."""

    def measure(advance: Advance) -> list[Row]:
        found = text.log_probabilities(text.inputs, text.targets, advance)
        return [_row("clean", "", "", "perplexity", found, text.targets != IGNORED)]

    return Measurement({"test": "clean"}, 1.0, measure)


def word_swap_measurement(text: Text, share: float, token: int, keep: Sequence[int]) -> Measurement[Row]:
    """Perplexity of the swapped text, and of those of its words that stayed."""

    def measure(advance: Advance) -> list[Row]:
        inputs, targets, swapped = swap_words(
            text.inputs, text.targets, share=share, token=token, keep=keep, seed=text.seed
        )
        found, counted = text.log_probabilities(inputs, targets, advance), targets != IGNORED
        setting, name = f"{100 * share:g}%", f"token {token}"
        return [
            _row("word swap", name, setting, "perplexity", found, counted),
            _row("word swap", name, setting, "perplexity of the words that stayed", found, counted & ~swapped),
        ]

    return Measurement({"test": "word swap", "share": share, "token": token, "keep": list(keep)}, 1.0, measure)


def _row(test: str, name: str, setting: str, metric: str, found: Tensor, counted: Tensor) -> Row:
    value, count = perplexity(found, counted)
    note = (GIVES_NAN if count else "no word is left") if math.isnan(value) else ""
    return Row(test, name, setting, metric, value, count, note=note)
