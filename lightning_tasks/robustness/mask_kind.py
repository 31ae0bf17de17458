"""Segmentation: mIoU, clean and under corruptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_tasks.robustness.corruptions import SMALLEST, corruption_library, too_small
from lightning_tasks.robustness.kind import Batch, Plan
from lightning_tasks.robustness.segmentation_suite import (
    MaskedImages,
    clean_mask_measurement,
    corrupted_mask_measurement,
)

if TYPE_CHECKING:
    from lightning_tasks.callbacks.robustness import RobustnessEvaluation


class MaskKind:
    """:class:`~lightning_tasks.SegmentationTask`: see :class:`~lightning_tasks.robustness.kind.Kind`."""

    def check(self, asked: RobustnessEvaluation) -> None:
        if asked.corrupted:
            corruption_library()
        if asked.baseline is not None:
            raise ValueError("baseline is for mCE, which is of classifiers: leave it out for a SegmentationTask")
        if asked.attacks or asked.shifts or asked.ood:
            rank_zero_warn("attacks, shifts and ood are for classifiers: not measured of a SegmentationTask")

    def first(self, batch: Batch, room: int | None) -> Batch:
        return batch[0][:room], batch[1][:room]

    def plan(self, asked: RobustnessEvaluation, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        images = [image for batch, _ in seen for image in batch]
        masks = [mask for _, batch in seen for mask in batch]
        # The loader's batches: it knows which images have one size, and how many fit into memory.
        batch_size = 1 if len({image.shape for image in images}) > 1 else max(len(batch) for batch, _ in seen)
        classes, ignored = task.hparams["num_classes"], task.hparams["ignore_index"]
        subject = MaskedImages(
            *(model, images, masks, classes, ignored, task.device, batch_size, asked.num_workers, asked.seed)
        )
        measurements = [clean_mask_measurement(subject)]
        small = [image for image in images if min(image.shape[1:]) < SMALLEST]
        if not small:
            measurements += [corrupted_mask_measurement(subject, *which) for which in asked.corrupted]
        elif asked.corrupted:
            rank_zero_warn(f"no corruption is measured: {too_small(small[0])}")

        def one_pass() -> None:
            subject.scores(images[:batch_size], lambda share: None)

        return Plan(measurements, one_pass, len(images), batch_size, [*images, *masks])
