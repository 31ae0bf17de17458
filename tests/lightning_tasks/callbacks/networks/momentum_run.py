"""A student and its momentum teacher with swapped attention, trained in two processes: a program of the tests."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from lightning_tasks.callbacks import SwapAttention
from tests.lightning_tasks.callbacks.modules import TinyLM, fit


class Momentum(TinyLM):
    """The teacher is a frozen copy, runs under no_grad, and follows the student over zipped Parameters."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.momentum = momentum
        self.distances: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            student, self.net = self.net, self.teacher
            taught = self(batch[0])
            self.net = student
            self.distances.append(float((taught - self(batch[0])).abs().max()))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 1 - self.momentum)


if __name__ == "__main__":
    module = Momentum(momentum=0.0)  # the teacher is the student before this step
    fit(module, [SwapAttention(sys.argv[1])], strategy="ddp", devices=2, max_steps=3)
    assert max(module.distances) < 1e-5, module.distances
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())
    weights = torch.cat([parameter.flatten() for parameter in module.parameters()])
    both = module.all_gather(weights)
    assert torch.equal(both[0], both[1])
    print("equal")
