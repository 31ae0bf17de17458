"""What is measured of a segmentation task: its masks on images as they are, attacked, and corrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from attention_modules.precision import to_float64
from lightning_tasks.robustness.attacks.common import IGNORED, NonFiniteLogitsError
from lightning_tasks.robustness.attacks.gradient import input_gradient_norms
from lightning_tasks.robustness.attacks.table import AttackSetting
from lightning_tasks.robustness.corruptions import LIBRARIES, SMALLEST, CorruptedImages, require_library, too_small
from lightning_tasks.robustness.evaluation import Batch, Plan
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.robustness.tested_model import gradient_note, held_still
from lightning_tasks.runs.measurements import Advance, Measurement, library_versions
from lightning_tasks.runs.robustness import Row
from lightning_tasks.training.segmentation_metrics import SegmentationScores, scores

ATTACKS = ("fgsm", "pgd")
METRICS = {"miou": "mIoU", "mean_accuracy": "mean accuracy", "overall_accuracy": "overall accuracy"}


@dataclass
class MaskedImages:
    """A segmentation task and the images that it is measured on.

    Args:
        task: gives masks ``[B, H, W]`` from ``predict_step((images, masks), index)``, logits by its forward pass.
        images: each ``[3, H, W]`` in [0, 1].
        masks: each ``[H, W]``.
        num_classes, ignore_index: of the masks.
        device: where the model is.
        batch_size: images at a time; 1 where their sizes differ.
        num_workers: processes that corrupt images.
        seed: of the corruptions.
    """

    task: Any
    images: Sequence[Tensor]
    masks: Sequence[Tensor]
    num_classes: int
    ignore_index: int
    device: torch.device
    batch_size: int = 1
    num_workers: int = 0
    seed: int = 0

    def scores(self, images: Any, advance: Advance) -> dict[str, float]:
        """The scores over all images, a sequence or data set of ``[3, H, W]``."""
        metric, first = SegmentationScores(self.num_classes, self.ignore_index), 0
        with held_still(self.task, gradients=False):
            # A generator of its own: starting a loader must not move the global random state.
            for batch in DataLoader(images, self.batch_size, num_workers=self.num_workers, generator=torch.Generator()):
                masks = torch.stack(list(self.masks[first : first + len(batch)]))
                metric.update(self.task.predict_step((batch.to(self.device), None), 0).cpu(), masks)
                first += len(batch)
                advance(len(batch) / len(images))
        return scores(metric.compute())

    def labeled_batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The index of the first image, images and masks, where -100 marks what does not count."""
        for first in range(0, len(self.images), self.batch_size):
            rows = slice(first, first + self.batch_size)
            images, masks = (torch.stack(list(each[rows])).to(self.device) for each in (self.images, self.masks))
            yield first, images, masks.masked_fill(masks == self.ignore_index, IGNORED)

    @cached_property
    def gradient_norms(self) -> tuple[float, float]:
        """Mean L1 and L2 norm of the gradient of an image's loss for that image."""
        pairs = [torch.stack(input_gradient_norms(self.task, *batch)) for _, *batch in self.labeled_batches()]
        first, second = to_float64(torch.cat(pairs, 1)).mean(1).tolist()
        return first, second


def clean_mask_measurement(subject: MaskedImages) -> Measurement:
    """All scores of the images as they are."""

    def measure(advance: Advance) -> list[Row]:
        found = subject.scores(subject.images, advance)
        return [Row("clean", "", "", METRICS[name], value, len(subject.images)) for name, value in found.items()]

    return Measurement({"test": "clean"}, 1.0, measure, [("clean", "", "", each) for each in METRICS.values()])


def attacked_mask_measurement(
    subject: MaskedImages, setting: AttackSetting, eps: tuple[str, float]
) -> Measurement[Row]:
    """mIoU under an attack that raises the mean cross-entropy of an image's pixels."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        attacked: list[Tensor] = []
        for first, images, masks in subject.labeled_batches():
            drawn = {"seed": subject.seed + first} if setting.seeded else {}
            function = setting.attack.function
            attacked += function(subject.task, images, masks, eps=radius, **setting.options, **drawn).cpu()
            advance(len(images) / len(subject.images))
        found, norms = subject.scores(attacked, lambda share: None), subject.gradient_norms
        note = gradient_note(subject.task, norms[0])
        return [Row("attack", setting.label, text, METRICS["miou"], found["miou"], len(attacked), *norms, note=note)]

    what = {"test": "attack", "name": setting.label, "eps": text, "radius": radius}
    what |= {"kind": setting.kind, "options": setting.options}
    what |= {"batch_size": subject.batch_size} if setting.seeded else {}  # the draws of a batch are those of its first
    return Measurement(what, setting.passes, measure, [("attack", setting.label, text, METRICS["miou"])])


def corrupted_mask_measurement(subject: MaskedImages, name: str, severity: int) -> Measurement:
    """mIoU under a corruption."""

    def measure(advance: Advance) -> list[Row]:
        found = subject.scores(CorruptedImages(subject.images, name, severity, subject.seed), advance)
        return [Row("corruption", name, str(severity), METRICS["miou"], found["miou"], len(subject.images))]

    what = {"test": "corruption", "name": name, "severity": severity, "versions": library_versions(LIBRARIES)}
    return Measurement(what, 3.0, measure, [("corruption", name, str(severity), METRICS["miou"])])


class MaskKind:
    """:class:`~lightning_tasks.SegmentationTask`: see :class:`~lightning_tasks.robustness.evaluation.Kind`."""

    def check(self, asked: RobustnessSettings) -> None:
        if asked.baselines:
            raise ValueError("baseline is for mCE, which is of classifiers: leave it out for a SegmentationTask")
        if asked.imagenet_c is not None:
            raise ValueError("imagenet_c has images with classes: leave it out for a SegmentationTask")
        others = [each.kind for each in asked.attacks if each.name not in ATTACKS]
        others += [name for name in ("shifts", "ood") if getattr(asked, name)]
        if others:
            rank_zero_warn(
                f"{', '.join(others)}: for classifiers, not measured of a SegmentationTask, whose attacks are "
                f"{' and '.join(ATTACKS)}"
            )

    def first(self, asked: RobustnessSettings, batch: Batch, room: int | None) -> Batch:
        if asked.corrupted:
            require_library(batch[0].shape)
        return batch[0][:room], batch[1][:room]

    def plan(self, asked: RobustnessSettings, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        images = [image for batch, _ in seen for image in batch]
        masks = [mask for _, batch in seen for mask in batch]
        # The loader's batches: it knows which images have one size, and how many fit into memory.
        batch_size = 1 if len({image.shape for image in images}) > 1 else max(len(batch) for batch, _ in seen)
        classes, ignored = task.hparams["num_classes"], task.hparams["ignore_index"]
        subject = MaskedImages(
            *(model, images, masks, classes, ignored, task.device, batch_size, asked.num_workers, asked.seed)
        )
        measurements = [clean_mask_measurement(subject)]
        for setting in asked.attacks:
            if setting.name in ATTACKS:
                measurements += [attacked_mask_measurement(subject, setting, eps) for eps in setting.eps or asked.eps]
        small = [image for image in images if min(image.shape[1:]) < SMALLEST]
        if not small:
            measurements += [corrupted_mask_measurement(subject, *which) for which in asked.corrupted]
        elif asked.corrupted:
            rank_zero_warn(f"no corruption is measured: {too_small(small[0])}")

        def one_pass() -> None:
            _check_finite(task)
            subject.scores(images[:batch_size], lambda share: None)

        return Plan(measurements, one_pass, len(images), batch_size, [*images, *masks])


def _check_finite(task: nn.Module) -> None:
    """Tell a network of nan by its weights and running statistics, as its masks are numbers all the same.

    Raises:
        NonFiniteLogitsError: a trained weight is nan or infinite, or anything else nan.
    """
    bad = [name for name, weight in task.named_parameters() if weight.requires_grad and not weight.isfinite().all()]
    others = [
        *task.named_buffers(),
        *((name, each) for name, each in task.named_parameters() if not each.requires_grad),
    ]
    bad += [name for name, each in others if each.is_floating_point() and each.isnan().any()]  # a mask may be -inf
    if bad:
        raise NonFiniteLogitsError(
            f"{type(task).__name__} has weights that are not finite (nan or inf), {bad[0]} first of {len(bad)}: its "
            "masks mean nothing"
        )
