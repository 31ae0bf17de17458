"""Language models: perplexity, clean and with words swapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_tasks.robustness.kind import Batch, Plan
from lightning_tasks.robustness.text_suite import Text, clean_text_measurement, word_swap_measurement

if TYPE_CHECKING:
    from lightning_tasks.callbacks.robustness import RobustnessEvaluation


class TextKind:
    """:class:`~lightning_tasks.LanguageModelingTask`: see :class:`~lightning_tasks.robustness.kind.Kind`."""

    def check(self, asked: RobustnessEvaluation) -> None:
        """Nothing to refuse."""

    def first(self, batch: Batch, room: int | None) -> Batch:
        return batch  # a limit of images is none of windows

    def plan(self, asked: RobustnessEvaluation, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        inputs, targets = (torch.cat(parts) for parts in zip(*seen, strict=True))
        text = Text(model, inputs, targets, task.device, asked.batch_size, asked.seed)
        measurements = [clean_text_measurement(text)]
        if asked.word_swap is not None:
            swap = (asked.word_swap, asked.word_swap_token, asked.word_swap_keep)
            measurements.append(word_swap_measurement(text, *swap))

        def one_pass() -> None:
            part = slice(0, asked.batch_size)
            Text(model, inputs[part], targets[part], text.device, asked.batch_size).log_probabilities(
                inputs[part], targets[part], lambda share: None
            )

        return Plan(measurements, one_pass, len(inputs), asked.batch_size, [inputs, targets])
