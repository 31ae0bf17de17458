"""What is measured of a language model: perplexity on the text as it is, and with words swapped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tasks.robustness.attacks.common import is_share
from lightning_tasks.robustness.evaluation import Batch, Plan
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.robustness.tested_model import held_still
from lightning_tasks.runs.measurements import Advance, Measurement
from lightning_tasks.runs.robustness import GIVES_NAN, Row

IGNORED = -100


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
    _clean: Tensor | None = field(default=None, init=False, repr=False)

    def clean(self, advance: Advance) -> Tensor:
        """ln p of every target of the text as it is, computed once."""
        if self._clean is None:
            self._clean = self.log_probabilities(self.inputs, self.targets, advance)
        return self._clean

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
        found = text.clean(advance)
        return [_row("clean", "", "", "perplexity", found, text.targets != IGNORED)]

    return Measurement({"test": "clean"}, 1.0, measure)


def word_swap_measurement(text: Text, share: float, token: int, keep: Sequence[int]) -> Measurement[Row]:
    """Perplexity of the swapped text, of those of its words that stayed, and of these same words in clean text."""

    def measure(advance: Advance) -> list[Row]:
        inputs, targets, swapped = swap_words(
            text.inputs, text.targets, share=share, token=token, keep=keep, seed=text.seed
        )
        found, counted = text.log_probabilities(inputs, targets, advance), targets != IGNORED
        clean = text.clean(lambda share: None)  # measured before, but where a run goes on from kept rows
        setting, name, stayed = f"{100 * share:g}%", f"token {token}", counted & ~swapped
        return [
            _row("word swap", name, setting, "perplexity", found, counted),
            _row("word swap", name, setting, "perplexity of the words that stayed", found, stayed),
            _row("word swap", name, setting, "clean perplexity of the words that stayed", clean, stayed),
        ]

    what = {"test": "word swap", "share": share, "token": token, "keep": list(keep), "clean": "words that stayed"}
    return Measurement(what, 1.0, measure)


def _row(test: str, name: str, setting: str, metric: str, found: Tensor, counted: Tensor) -> Row:
    value, count = perplexity(found, counted)
    note = (GIVES_NAN if count else "no word is left") if math.isnan(value) else ""
    return Row(test, name, setting, metric, value, count, note=note)


class TextKind:
    """:class:`~lightning_tasks.LanguageModelingTask`: see :class:`~lightning_tasks.robustness.evaluation.Kind`."""

    def check(self, asked: RobustnessSettings) -> None:
        """Nothing to refuse."""

    def first(self, asked: RobustnessSettings, batch: Batch, room: int | None) -> Batch:
        return batch  # a limit of images is none of windows

    def plan(self, asked: RobustnessSettings, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
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


def swap_words(
    inputs: Tensor,
    targets: Tensor,
    *,
    share: float = 0.025,
    token: int = 0,
    keep: Sequence[int] = (1,),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A text with a share of its words replaced by one generic token, wherever they stand: as input and as target.

    Our reading of the word-swap attack that RPC-Attention's language model was tested with (Teo and Nguyen, NeurIPS
    2024): words are drawn at random, independently of the model, and the generic token is `<unk>`. Special tokens,
    those that are the generic token already among them, are no words and are never drawn, so that ``share`` is the
    share of the words that change. A word that ends one window and begins the next is replaced in both or in neither.

    Args:
        inputs: ``[N, T]`` int64, the windows of a text in order, as the text data modules of this project cut it.
        targets: ``[N, T]``, each the token after its input; -100 where there is none.
        share: share of the words to replace, in [0, 1].
        token: id of the generic token (`<unk>`), itself no word.
        keep: ids of further special tokens (`<eos>`), never replaced.
        seed: of the draw.

    Returns:
        Inputs, targets, and which targets were replaced (bool), each ``[N, T]``.

    Raises:
        ValueError: if ``share`` is not in [0, 1], or the shapes are not those of windows.
    """
    if not is_share(share):
        raise ValueError(f"share is {share!r}: give the share of words to swap, in [0, 1]; 2.5% is 0.025")
    if inputs.ndim != 2 or inputs.shape != targets.shape:
        raise ValueError(f"inputs and targets must both be [N, T], got {list(inputs.shape)} and {list(targets.shape)}")
    # Position p of the text is target p of all windows in a row, and the input right after it.
    drawn = torch.rand(targets.numel() + 1, generator=torch.Generator().manual_seed(seed)) < share
    drawn = drawn.to(inputs.device)
    drawn[0] = False  # what stands before the text
    special = torch.tensor([token, *keep], dtype=inputs.dtype, device=inputs.device)

    def replaced(tokens: Tensor, chosen: Tensor) -> Tensor:
        return chosen.view(tokens.shape) & ~torch.isin(tokens, special) & (tokens != IGNORED)

    in_inputs, in_targets = replaced(inputs, drawn[:-1]), replaced(targets, drawn[1:])
    return inputs.masked_fill(in_inputs, token), targets.masked_fill(in_targets, token), in_targets
