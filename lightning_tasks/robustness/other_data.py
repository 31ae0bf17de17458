"""What is measured of an image classifier on other data: on shifted data, and of what is out of distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tasks.robustness.attacks.common import NonFiniteLogitsError
from lightning_tasks.robustness.class_folders import (
    class_subset,
    files_digest,
    folder_images,
    imagenet_wnids,
    read_wnids,
)
from lightning_tasks.robustness.detection import (
    FITTED,
    LIBRARY,
    Detectors,
    Outputs,
    features_of,
    last_layer,
    ood_library,
    told_apart,
    training_images,
)
from lightning_tasks.robustness.outside import Outside
from lightning_tasks.robustness.own_evaluation import evaluation_transform
from lightning_tasks.robustness.released_corruptions import released_measurement
from lightning_tasks.robustness.scores import OOD_METRICS, anomaly_scores, detection_metrics
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.robustness.subject import Subject, share_right
from lightning_tasks.robustness.tested_model import held_still
from lightning_tasks.runs.measurements import Advance, Measurement, library_versions
from lightning_tasks.runs.robustness import Row

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import ImageDataset


def shift_measurement(
    subject: Subject, name: str, root: str, wnids: Sequence[str], transform: Mapping[str, Any]
) -> Measurement[Row]:
    """Top-1 accuracy on a folder of images by wnid, among its classes, resized as the model's evaluation asks."""
    classes = class_subset(root, wnids)
    images, files = _folder(subject, root, transform)

    def measure(advance: Advance) -> list[Row]:
        logits, labels = subject.labeled_logits(images, advance=advance)
        note = f"among {len(classes)} classes{_left_out(images)}"
        return [Row("shift", name, "", **share_right(logits[:, classes].argmax(1) == labels), note=note)]

    what = {"test": "shift", "name": name, "files": files, "classes": classes, "resized": dict(transform)}
    return Measurement(what, len(images) / len(subject.images), measure, [("shift", name, "", "accuracy")])


def ood_measurement(
    subject: Subject,
    name: str,
    outside: Outside,
    wnids: Sequence[str] | None,
    transform: Mapping[str, Any],
    told_by: ToldBy | None = None,
) -> Measurement[Row]:
    """AUROC, AUPR and FPR95 of the test images against images that belong to none of the classes.

    Where these are in folders by wnids of the model's classes, as in ImageNet-O, both sides are restricted to those
    classes, and images are resized by ``transform``, as the model's own evaluation asks.

    Raises:
        ValueError: if no test image is of these classes.
    """
    names = outside.names() if outside.folder else []
    known = wnids is not None and bool(names) and set(names) <= set(wnids)
    classes = [wnids.index(each) for each in names] if known and wnids is not None else None
    _, channels, height, width = subject.images.shape
    images, files = outside.images(height, width, channels, transform if known else None)
    chosen = torch.ones_like(subject.labels, dtype=torch.bool)
    if classes is not None:
        chosen = torch.isin(subject.labels, torch.tensor(classes))
    if not chosen.any():
        raise ValueError(
            f"none of the {len(chosen)} test images is of the {len(classes or ())} classes of {outside.folder}, which "
            "it is to be told from; give more images (num_images: null for all)"
        )

    def measure(advance: Advance) -> list[Row]:
        found: list[tuple[str, dict[str, float], str]] = []  # setting, figures, and what is said of them
        if told_by is None:
            inside, (away, _) = subject.logits(subject.images[chosen]), subject.labeled_logits(images, advance=advance)
            if classes is not None:
                inside, away = inside[:, classes], away[:, classes]
            found.append(("", detection_metrics(anomaly_scores(inside), anomaly_scores(away)), ""))
            sizes = len(inside), len(away)
        else:
            within, without = told_by.inside(chosen), told_by.outputs(images, advance)
            detectors = told_by.detectors(classes)
            pair = detectors.scores(within), detectors.scores(without)
            for score in told_by.scores:
                found.append((score, told_apart(pair[0][score], pair[1][score]), told_by.described(score)))
            sizes = len(within.logits), len(without.logits)
        among = "all classes" if classes is None else f"{len(classes)} classes"
        note = f"{sizes[0]:,} inside, {sizes[1]:,} outside (positive), among {among}{_left_out(images)}"
        return [
            Row("out of distribution", name, setting, metric, figures[metric], sum(sizes), note=f"{note}{said}")
            for setting, figures, said in found
            for metric in OOD_METRICS
        ]

    what: dict[str, Any] = {"test": "ood", "name": name, "files": files, "classes": classes}
    what |= {"resized": dict(transform)} if known else {}
    if told_by is not None:
        versions = library_versions([LIBRARY, "scikit-learn"])  # whose neighbors `knn` has
        what |= {"scores": told_by.scores, "fit": told_by.digest(), "versions": versions}
    settings = [""] if told_by is None else told_by.scores
    lines = [("out of distribution", name, setting, metric) for setting in settings for metric in OOD_METRICS]
    return Measurement(what, 1 + len(images) / len(subject.images), measure, lines)


class ToldBy:
    """Scores by the library, with what they need of the model and of training images, each computed once.

    Args:
        subject: the classifier and its test images.
        scores: names of the scores.
        training: images that ``FITTED`` are fitted to, and the places that count.
    """

    def __init__(self, subject: Subject, scores: Sequence[str], training: tuple[ImageDataset, Sequence[int]] | None):
        self.scores, self._subject, self._training = scores, subject, training
        batch = subject.images[: subject.batch_size].to(subject.device)
        self._layer = None if training is None else last_layer(subject.model, batch)

    @cached_property
    def _inside(self) -> Outputs:
        return self._run(lambda: self._subject.logits(self._subject.images))

    @cached_property
    def _fitted_to(self) -> Outputs:
        if self._training is None:
            raise ValueError("no training images were given, as no score is fitted")
        return self._run(lambda: self._subject.labeled_logits(*self._training)[0])  # type: ignore[misc]

    def inside(self, chosen: Tensor) -> Outputs:
        """For those test images that count."""
        return Outputs(self._inside.logits[chosen], self._inside.features[chosen])

    def outputs(self, images: ImageDataset, advance: Advance) -> Outputs:
        """For other images."""
        return self._run(lambda: self._subject.labeled_logits(images, advance=advance)[0])

    def detectors(self, classes: Sequence[int] | None) -> Detectors:
        """The scores among these classes."""
        return Detectors(self.scores, self._layer, lambda: self._fitted_to, classes)

    def described(self, score: str) -> str:
        """What the note of a row says of a score."""
        to = f", fitted to {len(self._training[1]):,} training images" if self._training and score in FITTED else ""
        return f"; {LIBRARY} {version(LIBRARY)}{to}"

    def digest(self) -> str:
        """Changes with the pixels of the images that are fitted to."""
        digest = hashlib.sha256()
        images, places = self._training or (None, ())
        for place in places:
            item = images[place]  # type: ignore[index]
            digest.update(b"none" if item is None else item[0].numpy().tobytes())
        return digest.hexdigest()

    def _run(self, logits: Callable[[], Tensor]) -> Outputs:
        if self._layer is None:
            found = logits()
            return Outputs(found, found[:, :0])
        with features_of(self._layer) as seen:
            found = logits()
        return Outputs(found, torch.cat(seen))


def _folder(subject: Subject, root: str, transform: Mapping[str, Any]) -> tuple[ImageDataset, str]:
    """The images of a folder in the shape of the subject's, and a digest of the files."""
    _, channels, height, width = subject.images.shape
    images = folder_images(root, (height, width), channels, transform=transform)
    return images, files_digest(images.images, root)


def _left_out(images: ImageDataset) -> str:
    return f"; {images.skipped:,} of {len(images):,} files cannot be read and are left out" if images.skipped else ""


def other_data(asked: RobustnessSettings, subject: Subject, trainer: Any) -> list[Measurement[Row]]:
    """The released ImageNet-C, shifted data, and what is out of distribution."""
    if not asked.shifts and not asked.ood and asked.imagenet_c is None:
        return []
    wnids = _wnids(asked, subject, trainer)
    transform = evaluation_transform(subject.model, trainer.datamodule)
    measurements = []
    if asked.imagenet_c is not None:
        if wnids is None:
            raise ValueError("imagenet_c needs the class names of the model, in order: give wnids=, a file of them")
        measurements += [
            released_measurement(subject, asked.imagenet_c, *which, wnids, transform, asked.num_images)
            for which in asked.corrupted
        ]
    for name, root in asked.shifts.items():
        if wnids is None:
            raise ValueError(f"{name} needs the class names of the model, in order: give wnids=, a file of them")
        measurements.append(shift_measurement(subject, name, root, wnids, transform))
    told_by = None
    if asked.ood and asked.ood_scores is not None:
        ood_library()
        fits = any(score in FITTED for score in asked.ood_scores)
        training = training_images(trainer.datamodule, asked.ood_fit_images) if fits else None
        told_by = ToldBy(subject, asked.ood_scores, training)
    return measurements + [ood_measurement(subject, *item, wnids, transform, told_by) for item in asked.ood.items()]


def _wnids(asked: RobustnessSettings, subject: Subject, trainer: Any) -> list[str] | None:
    try:
        classes = subject.logits(subject.images[:1]).shape[1]
    except NonFiniteLogitsError:  # which the measurements say; the count is known all the same
        with held_still(subject.model, gradients=False):
            classes = subject.model(subject.images[:1].to(subject.device)).shape[1]
    own = getattr(trainer.datamodule, "wnids", None) if asked.wnids is None else read_wnids(asked.wnids)
    if own is None:
        return imagenet_wnids() if classes == 1000 else None
    if len(own) != classes:
        raise ValueError(f"the model has {classes} classes, and {len(own)} wnids were given")
    return list(own)
