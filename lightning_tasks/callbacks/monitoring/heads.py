"""What a monitor saw of each head: kept on the device, then a table and heat maps in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_tasks.figures.heads import draw_heads
from lightning_tasks.runs.files import run_folder, save_figure
from lightning_tasks.runs.heads import TABLE, History, read_heads, write_heads

MOST_PENDING = 512  # records on the device, where no validation has them written


def stack_sums(sums: Sequence[Tensor | None], num_heads: Sequence[int], device: torch.device) -> Tensor:
    """Sums and counts of layers, ``[2, H]`` each, as ``[2, layers, H]``; zero where nothing was seen, or no head is."""
    stacked = torch.zeros(2, len(num_heads), max(num_heads), device=device)
    for index, seen in enumerate(sums):
        if seen is not None:
            stacked[:, index, : seen.shape[1]] = seen
    return stacked


class HeadRecord:
    """Means of heads by name and step; they leave the device by :meth:`write`, or many at once. For rank zero alone."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, int, Tensor]] = []
        self._layers: list[int] = []  # their numbers
        self._started: set[str] = set()  # names that this run of a trainer has written
        self._is_drawn = True  # whether the heat maps show all that is written

    def restart(self) -> None:
        """For another run of a trainer."""
        self._pending, self._started, self._is_drawn = [], set(), True

    def add(self, trainer: Any, name: str, step: int, layers: Sequence[int], sums: Tensor) -> None:
        """Keep sums over rows and their numbers, ``[2, layers, H]``, of layers (always the same) by number."""
        if trainer.is_global_zero and trainer.loggers:
            self._layers = list(layers)
            self._pending.append((name, step, sums))
            if len(self._pending) >= MOST_PENDING:
                self.write(trainer)

    def write(self, trainer: Any) -> None:
        """Append what is kept to ``attention_heads.csv``."""
        pending, self._pending = self._pending, []
        folder = run_folder(trainer)
        if not pending or folder is None:
            return
        total, rows = torch.stack([sums for *_, sums in pending], 1).cpu()  # one transfer
        means = (total / rows).numpy()
        histories: dict[str, History] = {}
        for name in dict.fromkeys(name for name, *_ in pending):
            places = [place for place, (other, *_) in enumerate(pending) if other == name]
            histories[name] = [pending[place][1] for place in places], self._layers, means[places]
        write_heads(folder / TABLE, histories, self._started, trains=trainer.state.fn == "fit")
        self._started |= histories.keys()
        self._is_drawn = False

    def draw(self, trainer: Any, unit: str) -> None:
        """Write, and draw what is in the table under the names that this run has written, unless nothing is new."""
        self.write(trainer)
        folder = run_folder(trainer)
        if self._is_drawn or folder is None:
            return
        self._is_drawn = True
        for name, (steps, layers, values) in read_heads(folder / TABLE).items():
            if name in self._started:
                save_figure(trainer, draw_heads(steps, layers, values, f"{name} {unit}"), f"{name}_heads")
