"""What is measured of an image classifier: clean, attacked, corrupted, on shifted data, and out of distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tasks.robustness.attack_table import GRADIENT, AttackSetting
from lightning_tasks.robustness.class_folders import class_folders, class_subset, folder_digest, folder_images
from lightning_tasks.robustness.corruptions import CORRUPTIONS, CorruptedImages
from lightning_tasks.robustness.gradient_norm import input_gradient_norms
from lightning_tasks.robustness.linf import held_still, logits_of
from lightning_tasks.robustness.ood import OOD_METRICS, anomaly_scores, detection_metrics
from lightning_tasks.robustness.suite import Advance, Measurement
from lightning_tasks.robustness.table import Row


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
        """Logits ``[M, classes]`` of a tensor or a data set (whose labels are left out), on the CPU."""
        outputs = []
        with held_still(self.model, gradients=False):
            # A generator of its own: starting a loader must not move the global random state.
            for batch in DataLoader(images, self.batch_size, num_workers=self.num_workers, generator=torch.Generator()):
                pictures = batch[0] if isinstance(batch, (list, tuple)) else batch
                outputs.append(logits_of(self.model, pictures.to(self.device)).float().cpu())
                if advance is not None:
                    advance(len(pictures) / len(images))
        return torch.cat(outputs)

    def gradient_norms(self, own: bool) -> tuple[float, float]:
        """Mean L1 and L2 norm of the input gradient over the images, at the model's own predictions where ``own``."""
        if own not in self._norms:
            pairs = []
            for _, images, labels in self.batches():
                if own:
                    with held_still(self.model, gradients=False):
                        labels = logits_of(self.model, images).argmax(1)
                pairs.append(torch.stack(input_gradient_norms(self.model, images, labels)))
            first, second = torch.cat(pairs, 1).double().mean(1).tolist()
            self._norms[own] = (first, second)
        return self._norms[own]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the rows ``[N, classes]`` whose highest logit is that of the label."""
    return (logits.argmax(1) == labels).double().mean().item()


def clean_measurement(subject: Subject) -> Measurement:
    """Accuracy on the images as they are."""

    def measure(advance: Advance) -> list[Row]:
        logits = subject.logits(subject.images, advance)
        return [Row("clean", "", "", "accuracy", accuracy(logits, subject.labels), len(subject.labels))]

    return Measurement({"test": "clean"}, 1.0, measure)


def attack_measurement(
    subject: Subject,
    setting: AttackSetting,
    eps: tuple[str, float],
    source: Callable[[], nn.Module] | None = None,
    source_digest: str = "",
) -> Measurement:
    """Accuracy under an attack; ``source`` gives the twin of a transfer attack."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        options = dict(setting.options)
        if setting.on_source is not None and source is not None:
            attack = AttackSetting.read({"name": setting.on_source, **options}).attack.function
            options |= {"source": source(), "attack": attack}
        right = 0
        for first, images, labels in subject.batches():
            if setting.seeded:
                options["seed"] = subject.seed + first
            attacked = setting.attack.function(subject.model, images, labels, eps=radius, **options)
            with held_still(subject.model, gradients=False):
                right += int((logits_of(subject.model, attacked).argmax(1) == labels).sum())
            advance(len(images) / len(subject.images))
        norms = (math.nan, math.nan)
        if setting.attack.white_box:
            norms = subject.gradient_norms(own=setting.name.startswith("released"))
        share = right / len(subject.images)
        return [Row("attack", setting.label, text, "accuracy", share, len(subject.images), *norms)]

    what = {"test": "attack", "name": setting.label, "eps": text, "options": setting.options, "source": source_digest}
    return Measurement(what, setting.passes + GRADIENT * setting.attack.white_box, measure)


def corruption_measurement(subject: Subject, name: str, severity: int) -> Measurement:
    """Accuracy under a corruption."""

    def measure(advance: Advance) -> list[Row]:
        corrupted = CorruptedImages(subject.images, name, severity, subject.seed)
        share = accuracy(subject.logits(corrupted, advance), subject.labels)
        return [Row("corruption", name, str(severity), "accuracy", share, len(subject.images))]

    # To corrupt an image on the CPU takes about as long as a pass or two of a small model.
    return Measurement({"test": "corruption", "name": name, "severity": severity}, 3.0, measure)


def shift_measurement(subject: Subject, name: str, root: str, wnids: Sequence[str]) -> Measurement:
    """Top-1 accuracy on a folder of images by wnid, among the classes that the folder has."""
    classes, images = class_subset(root, wnids), _folder(subject, root)

    def measure(advance: Advance) -> list[Row]:
        logits = subject.logits(images, advance)
        _check_wnids(logits, wnids)
        share = accuracy(logits[:, classes], torch.tensor(images.targets))
        return [Row("shift", name, "", "accuracy", share, len(images), note=f"among {len(classes)} classes")]

    what = {"test": "shift", "name": name, "files": folder_digest(root), "classes": classes}
    return Measurement(what, len(images) / len(subject.images), measure)


def ood_measurement(subject: Subject, name: str, root: str, wnids: Sequence[str] | None) -> Measurement:
    """AUROC, AUPR and FPR95 of the test images against a folder of images that belong to none of the classes.

    Where the folders are wnids of the model's classes, as in ImageNet-O, both sides are restricted to those classes.

    Raises:
        ValueError: if no test image is of these classes.
    """
    known = wnids is not None and set(class_folders(root)) <= set(wnids)
    classes = class_subset(root, wnids) if known and wnids is not None else None
    images = _folder(subject, root)
    chosen = torch.ones_like(subject.labels, dtype=torch.bool)
    if classes is not None:
        chosen = torch.isin(subject.labels, torch.tensor(classes))
    if not chosen.any():
        raise ValueError(
            f"none of the {len(chosen)} test images is of the {len(classes or ())} classes of {root}, which it is to "
            "be told from; give more images (num_images: null for all)"
        )

    def measure(advance: Advance) -> list[Row]:
        inside, outside = subject.logits(subject.images[chosen]), subject.logits(images, advance)
        if classes is not None:
            _check_wnids(outside, wnids or ())
            inside, outside = inside[:, classes], outside[:, classes]
        found = detection_metrics(anomaly_scores(inside), anomaly_scores(outside))
        among = "all classes" if classes is None else f"{len(classes)} classes"
        note = f"{len(inside):,} inside, {len(outside):,} outside (positive), among {among}"
        total = len(inside) + len(outside)
        return [Row("out of distribution", name, "", metric, found[metric], total, note=note) for metric in OOD_METRICS]

    what = {"test": "ood", "name": name, "files": folder_digest(root), "classes": classes}
    return Measurement(what, 1 + len(images) / len(subject.images), measure)


def mean_corruption_row(rows: Sequence[Row]) -> list[Row]:
    """The mean over those of the fifteen corruptions, and the severities, that were measured."""
    measured = [row for row in rows if row.test == "corruption" and row.name in CORRUPTIONS]
    if not measured:
        return []
    names = {row.name for row in measured}
    note = f"{len(names)} of 15 corruptions, severities {', '.join(sorted({row.setting for row in measured}))}"
    mean = sum(row.value for row in measured) / len(measured)
    return [Row("mean corruption", "", "", measured[0].metric, mean, measured[0].samples, note=note)]


def _folder(subject: Subject, root: str) -> Any:
    _, channels, height, width = subject.images.shape
    return folder_images(root, (height, width), channels)


def _check_wnids(logits: Tensor, wnids: Sequence[str]) -> None:
    if logits.shape[1] != len(wnids):
        raise ValueError(f"the model has {logits.shape[1]} classes, and {len(wnids)} wnids were given")
