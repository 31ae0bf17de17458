"""Image classification: accuracy clean, attacked, corrupted, on shifted data, and out of distribution."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_tasks.robustness.class_folders import imagenet_wnids, read_wnids
from lightning_tasks.robustness.corruptions import SMALLEST, corruption_library, too_small
from lightning_tasks.robustness.image_suite import (
    Subject,
    attack_measurement,
    clean_measurement,
    corruption_measurement,
    gradient_measurement,
    ood_measurement,
    shift_measurement,
)
from lightning_tasks.robustness.in_precision import InPrecision
from lightning_tasks.robustness.kind import Batch, Plan
from lightning_tasks.robustness.linf import check_batch
from lightning_tasks.runs.measurements import Measurement
from lightning_tasks.runs.robustness import Row

if TYPE_CHECKING:
    from lightning_tasks.callbacks.robustness import RobustnessEvaluation


class ImageKind:
    """Images in [0, 1] to logits: see :class:`~lightning_tasks.robustness.kind.Kind`."""

    def check(self, asked: RobustnessEvaluation) -> None:
        if asked.corrupted:
            corruption_library()

    def first(self, batch: Batch, room: int | None) -> Batch:
        check_batch(*batch)
        return batch[0][:room], batch[1][:room]

    def plan(self, asked: RobustnessEvaluation, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
        images, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
        subject = Subject(model, images, labels, task.device, asked.batch_size, asked.num_workers, asked.seed)
        measurements = [clean_measurement(subject), *_attacks(asked, subject, task, trainer)]
        unmeasured = []
        if min(images.shape[2:]) >= SMALLEST:
            measurements += [corruption_measurement(subject, *which) for which in asked.corrupted]
        elif asked.corrupted:
            why = too_small(images[0])
            rank_zero_warn(f"no corruption is measured: {why}")
            unmeasured = [Row("mean corruption", "", "", "accuracy", math.nan, note=why)]
        measurements += _other_data(asked, subject, trainer)
        _warn_of_few_classes(subject)

        def one_pass() -> None:
            subject.logits(images[: asked.batch_size])

        return Plan(measurements, one_pass, len(images), asked.batch_size, [images, labels], unmeasured)


def _attacks(asked: RobustnessEvaluation, subject: Subject, task: Any, trainer: Any) -> list[Measurement[Row]]:
    white_box = {setting.at_own_prediction for setting in asked.attacks if setting.attack.white_box}
    measurements = [gradient_measurement(subject, own) for own in sorted(white_box)]
    for setting in asked.attacks:
        source, digest = None, ""
        if setting.source is not None:
            digest = hashlib.sha256(Path(setting.source).read_bytes()).hexdigest()
            source = cache(lambda path=setting.source: _twin(path, task, trainer))
        measurements += [attack_measurement(subject, setting, eps, source, digest) for eps in asked.eps]
    return measurements


def _twin(path: str, task: Any, trainer: Any) -> nn.Module:
    """The module in a checkpoint, swapped as it was there, where the tested one is.

    Its class is the one that the checkpoint names, else that of the tested module.
    """
    from lightning_tasks.checkpoints.load import load_module

    return InPrecision(load_module(path, type(task)).to(task.device).eval().requires_grad_(False), trainer)


def _other_data(asked: RobustnessEvaluation, subject: Subject, trainer: Any) -> list[Measurement[Row]]:
    """Shifted data, and what is out of distribution."""
    if not asked.shifts and not asked.ood:
        return []
    wnids = _wnids(asked, subject, trainer)
    measurements = []
    for name, root in asked.shifts.items():
        if wnids is None:
            raise ValueError(f"{name} needs the class names of the model, in order: give wnids=, a file of them")
        measurements.append(shift_measurement(subject, name, root, wnids))
    return measurements + [ood_measurement(subject, name, root, wnids) for name, root in asked.ood.items()]


def _wnids(asked: RobustnessEvaluation, subject: Subject, trainer: Any) -> list[str] | None:
    classes = subject.logits(subject.images[:1]).shape[1]
    own = getattr(trainer.datamodule, "wnids", None) if asked.wnids is None else read_wnids(asked.wnids)
    if own is None:
        return imagenet_wnids() if classes == 1000 else None
    if len(own) != classes:
        raise ValueError(f"the model has {classes} classes, and {len(own)} wnids were given")
    return list(own)


def _warn_of_few_classes(subject: Subject) -> None:
    classes = subject.logits(subject.images[:1]).shape[1]
    seen = len(subject.labels.unique())
    if seen < min(classes, len(subject.labels)) / 4:
        rank_zero_warn(
            f"the first {len(subject.labels)} test images are of {seen} of {classes} classes only: the loader goes "
            "through them class by class; set num_images: null, or give the test set in a mixed, fixed order"
        )
