"""What training does to a batch of images: random erasing, mixup and cutmix, label smoothing, all timm's."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor


@dataclass(frozen=True)
class Mixing:
    """Random erasing, then mixup or cutmix, in the order and with the parts of timm's (and DeiT's) training.

    Args:
        num_classes: C.
        mixup: alpha of mixup's Beta distribution, 0 for none.
        cutmix: alpha of cutmix's Beta distribution, 0 for none.
        mix_prob: probability that a batch is mixed at all.
        mix_switch_prob: probability of cutmix where both are on.
        label_smoothing: share of the target that is spread over all classes.
        random_erasing: probability that a rectangle of an image becomes noise.

    Raises:
        ValueError: if a value is out of its limits.
    """

    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    mix_switch_prob: float = 0.5
    label_smoothing: float = 0.0
    random_erasing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        for name in ("mix_prob", "mix_switch_prob", "random_erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability in [0, 1], got {getattr(self, name)!r}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing!r}")

    def __call__(self, images: Tensor, labels: Tensor, seed: list[int]) -> tuple[Tensor, Tensor]:
        """Changed images ``[B, C, H, W]`` (in place) and targets ``[B, classes]`` that add up to one.

        Args:
            images: normalized.
            labels: ``[B]`` int64.
            seed: what is drawn follows from it, and the global random states stay as they are (on a GPU the erased
                pixels' noise is drawn from its own state, which checkpoints keep).
        """
        with isolate_rng(include_cuda=False):
            _seed_all(seed)
            if self.random_erasing and len(images):
                erase = RandomErasing(self.random_erasing, mode="pixel", max_count=1, device=str(images.device))
                images = erase(images)
            if not (self.mixup or self.cutmix):
                return images, self._plain(labels)
            mix = Mixup(
                mixup_alpha=self.mixup,
                cutmix_alpha=self.cutmix,
                prob=self.mix_prob,
                switch_prob=self.mix_switch_prob,
                label_smoothing=self.label_smoothing,
                num_classes=self.num_classes,
            )
            even = len(images) - len(images) % 2  # timm mixes pairs; the odd one at the end of an epoch stays plain
            if not even:
                return images, self._plain(labels)
            _, targets = mix(images[:even], labels[:even])  # in place
            return images, torch.cat([targets, self._plain(labels[even:])])

    def _plain(self, labels: Tensor) -> Tensor:
        return mixup_target(labels, self.num_classes, 1.0, self.label_smoothing)


def step_seed(epoch: int, rank: int, batch_idx: int) -> list[int]:
    """The seed of a training step: that of `seed_everything`, and the step's place."""
    return [int(os.environ.get("PL_GLOBAL_SEED", 0)), epoch, rank, batch_idx]


def _seed_all(seed: list[int]) -> None:
    number = np.random.SeedSequence(seed).generate_state(1).item()
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - timm draws from the global state
    torch.default_generator.manual_seed(number)
