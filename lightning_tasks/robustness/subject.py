"""A classifier and the images that it is measured on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from attention_modules.precision import to_float64
from lightning_tasks.robustness.attacks.common import logits_of
from lightning_tasks.robustness.attacks.gradient import input_gradient_norms
from lightning_tasks.robustness.tested_model import held_still
from lightning_tasks.runs.measurements import Advance
from lightning_tasks.runs.robustness import right_as_text

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import ImageDataset


@dataclass
class Subject:
    """A classifier and the images that it is measured on.

    Args:
        model: images in [0, 1] to logits.
        images: ``[N, C, H, W]``.
        labels: ``[N]``.
        device: where the model is.
        batch_size: images at a time.
        num_workers: processes that corrupt and read images.
        seed: of every draw.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    device: torch.device
    batch_size: int = 100
    num_workers: int = 0
    seed: int = 0
    _norms: dict[bool, tuple[float, float]] = field(default_factory=dict)

    def batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Index of the first image, images and labels, on the device."""
        for first in range(0, len(self.images), self.batch_size):
            rows = slice(first, first + self.batch_size)
            yield first, self.images[rows].to(self.device), self.labels[rows].to(self.device)

    def logits(self, images: Any, advance: Advance | None = None) -> Tensor:
        """Logits ``[M, classes]`` of a tensor or a data set of images, on the CPU."""
        return self._outputs(images, None, advance)[0]

    def labeled_logits(
        self, images: ImageDataset, places: Sequence[int] | None = None, advance: Advance | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[M, classes]`` and labels ``[M]`` of those images (in these places) that can be read, on the CPU."""
        _, channels, height, width = self.images.shape
        from attnswap.datamodules.shared.images import collate_images

        chosen = images if places is None else Subset(images, places)
        found = self._outputs(chosen, partial(collate_images, shape=(channels, height, width)), advance)
        images.warn_of_skipped()
        return found

    def _outputs(self, images: Any, collate: Any, advance: Advance | None) -> tuple[Tensor, Tensor]:
        # A generator of its own: starting a loader must not move the global random state.
        workers = {"num_workers": self.num_workers, "generator": torch.Generator()}
        loader: DataLoader = DataLoader(images, self.batch_size, collate_fn=collate, **workers)  # type: ignore[arg-type]
        outputs, labels = [], [torch.zeros(0, dtype=torch.int64)]
        with held_still(self.model, gradients=False):
            for batch in loader:
                inputs, marks = batch if collate else (batch, labels[0])
                if len(inputs):
                    outputs.append(logits_of(self.model, inputs.to(self.device)).float().cpu())
                    labels.append(marks)
                if advance is not None:
                    advance(1 / len(loader))
        return torch.cat(outputs), torch.cat(labels)

    def gradient_norms(self, own: bool) -> tuple[float, float]:
        """Mean L1 and L2 norm of the input gradient over the images, at the model's own predictions where ``own``."""
        if own not in self._norms:
            pairs = []
            for _, images, labels in self.batches():
                if own:
                    with held_still(self.model, gradients=False):
                        labels = logits_of(self.model, images).argmax(1)
                pairs.append(torch.stack(input_gradient_norms(self.model, images, labels)))
            first, second = to_float64(torch.cat(pairs, 1)).mean(1).tolist()
            self._norms[own] = (first, second)
        return self._norms[own]


def share_right(right: Tensor) -> dict[str, Any]:
    """The fields of a row on images ``[N]`` that are right or not."""
    share = to_float64(right).mean().item()
    return {"metric": "accuracy", "value": share, "samples": len(right), "right": right_as_text(right.cpu())}
