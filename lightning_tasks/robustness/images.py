"""What is measured of an image classifier: clean, attacked, corrupted, on shifted data, and out of distribution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from attention_modules.precision import to_float64
from lightning_tasks.robustness.attacks.auto import LIBRARY, autoattack_library, autoattack_note, run_autoattack
from lightning_tasks.robustness.attacks.common import GRADIENT, check_batch, logits_of
from lightning_tasks.robustness.attacks.gradient import input_gradient_norms
from lightning_tasks.robustness.attacks.table import AttackSetting
from lightning_tasks.robustness.class_folders import (
    class_names,
    class_subset,
    files_digest,
    folder_images,
    imagenet_wnids,
    read_wnids,
)
from lightning_tasks.robustness.corruptions import LIBRARIES, SMALLEST, CorruptedImages, require_library, too_small
from lightning_tasks.robustness.evaluation import Batch, Plan
from lightning_tasks.robustness.scores import OOD_METRICS, anomaly_scores, detection_metrics
from lightning_tasks.robustness.settings import RobustnessSettings
from lightning_tasks.robustness.tested_model import InPrecision, held_still
from lightning_tasks.runs.measurements import Advance, Measurement, library_versions
from lightning_tasks.runs.robustness import Row, right_as_text

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

    def labeled_logits(self, images: ImageDataset, advance: Advance | None = None) -> tuple[Tensor, Tensor]:
        """Logits ``[M, classes]`` and labels ``[M]`` of those images that can be read, on the CPU."""
        _, channels, height, width = self.images.shape
        from attnswap.datamodules.shared.images import collate_images

        found = self._outputs(images, partial(collate_images, shape=(channels, height, width)), advance)
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


def clean_measurement(subject: Subject) -> Measurement[Row]:
    """Accuracy on the images as they are."""

    def measure(advance: Advance) -> list[Row]:
        logits = subject.logits(subject.images, advance)
        return [Row("clean", "", "", **share_right(logits.argmax(1) == subject.labels))]

    return Measurement({"test": "clean"}, 1.0, measure)


def gradient_measurement(subject: Subject, own: bool) -> Measurement[Row]:
    """Mean L1 and L2 norm of the input gradient, at the model's own predictions where ``own``, else at the labels."""
    at = "own prediction" if own else ""

    def measure(advance: Advance) -> list[Row]:
        norms = zip(("l1", "l2"), subject.gradient_norms(own), strict=True)
        advance(1)
        return [Row("input gradient", "", at, name, norm, len(subject.labels)) for name, norm in norms]

    return Measurement({"test": "input gradient", "at": at}, GRADIENT, measure)


def attack_measurement(
    subject: Subject,
    setting: AttackSetting,
    eps: tuple[str, float],
    source: Callable[[], nn.Module] | None = None,
    source_digest: str = "",
) -> Measurement[Row]:
    """Accuracy under an attack; ``source`` gives the twin of a transfer attack."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        options = dict(setting.options)
        if setting.on_source is not None and source is not None:
            attack = AttackSetting.read({"name": setting.on_source, **options}).attack.function
            options |= {"source": source(), "attack": attack}
        right = []
        for first, images, labels in subject.batches():
            if setting.seeded:
                options["seed"] = subject.seed + first
            attacked = setting.attack.function(subject.model, images, labels, eps=radius, **options)
            with held_still(subject.model, gradients=False):
                right.append(logits_of(subject.model, attacked).argmax(1) == labels)
            advance(len(images) / len(subject.images))
        norms = (math.nan, math.nan)
        if setting.attack.white_box:
            norms = subject.gradient_norms(setting.at_own_prediction)
        found = share_right(torch.cat(right))
        return [Row("attack", setting.label, text, **found, gradient_l1=norms[0], gradient_l2=norms[1])]

    what: dict[str, Any] = {"test": "attack", "name": setting.label, "eps": text}
    what |= {"kind": setting.kind, "options": setting.options, "source": source_digest}
    return Measurement(what, setting.passes, measure)


def autoattack_measurement(subject: Subject, setting: AttackSetting, eps: tuple[str, float]) -> Measurement[Row]:
    """Accuracy after each attack of AutoAttack, and the worst case, with what its checks say."""
    text, radius = eps

    def measure(advance: Advance) -> list[Row]:
        options = {"batch_size": subject.batch_size, "seed": subject.seed, "advance": advance, **setting.options}
        images, labels = subject.images.to(subject.device), subject.labels.to(subject.device)
        found = run_autoattack(subject.model, images, labels, eps=radius, **options)
        first, second = subject.gradient_norms(own=False)

        def row(name: str, right: Tensor, note: str = "") -> Row:
            return Row("attack", name, text, **share_right(right), gradient_l1=first, gradient_l2=second, note=note)

        after = {name: found.standing[name] for name in setting.options["attacks"]}
        worst = row(setting.label, [*after.values()][-1], autoattack_note(found, setting.options))
        return [worst, *(row(f"{setting.label} after {name}", right) for name, right in after.items())]

    what = {"test": "attack", "name": setting.label, "eps": text, "kind": setting.kind, "options": setting.options}
    return Measurement({**what, "versions": library_versions([LIBRARY])}, setting.passes, measure)


def corruption_measurement(subject: Subject, name: str, severity: int) -> Measurement[Row]:
    """Accuracy under a corruption."""

    def measure(advance: Advance) -> list[Row]:
        corrupted = CorruptedImages(subject.images, name, severity, subject.seed)
        right = subject.logits(corrupted, advance).argmax(1) == subject.labels
        return [Row("corruption", name, str(severity), **share_right(right))]

    what = {"test": "corruption", "name": name, "severity": severity, "versions": library_versions(LIBRARIES)}
    # To corrupt an image on the CPU takes about as long as a pass or two of a small model.
    return Measurement(what, 3.0, measure)


def shift_measurement(subject: Subject, name: str, root: str, wnids: Sequence[str]) -> Measurement[Row]:
    """Top-1 accuracy on a folder of images by wnid, among the classes that the folder has."""
    classes = class_subset(root, wnids)
    images, files = _folder(subject, root)

    def measure(advance: Advance) -> list[Row]:
        logits, labels = subject.labeled_logits(images, advance)
        note = f"among {len(classes)} classes{_left_out(images)}"
        return [Row("shift", name, "", **share_right(logits[:, classes].argmax(1) == labels), note=note)]

    what = {"test": "shift", "name": name, "files": files, "classes": classes}
    return Measurement(what, len(images) / len(subject.images), measure)


def ood_measurement(subject: Subject, name: str, root: str, wnids: Sequence[str] | None) -> Measurement[Row]:
    """AUROC, AUPR and FPR95 of the test images against a folder of images that belong to none of the classes.

    Where the folders are wnids of the model's classes, as in ImageNet-O, both sides are restricted to those classes.

    Raises:
        ValueError: if no test image is of these classes.
    """
    known = wnids is not None and set(class_names(root)) <= set(wnids)
    classes = class_subset(root, wnids) if known and wnids is not None else None
    images, files = _folder(subject, root)
    chosen = torch.ones_like(subject.labels, dtype=torch.bool)
    if classes is not None:
        chosen = torch.isin(subject.labels, torch.tensor(classes))
    if not chosen.any():
        raise ValueError(
            f"none of the {len(chosen)} test images is of the {len(classes or ())} classes of {root}, which it is to "
            "be told from; give more images (num_images: null for all)"
        )

    def measure(advance: Advance) -> list[Row]:
        inside, (outside, _) = subject.logits(subject.images[chosen]), subject.labeled_logits(images, advance)
        if classes is not None:
            inside, outside = inside[:, classes], outside[:, classes]
        found = detection_metrics(anomaly_scores(inside), anomaly_scores(outside))
        among = "all classes" if classes is None else f"{len(classes)} classes"
        note = f"{len(inside):,} inside, {len(outside):,} outside (positive), among {among}{_left_out(images)}"
        total = len(inside) + len(outside)
        return [Row("out of distribution", name, "", metric, found[metric], total, note=note) for metric in OOD_METRICS]

    what = {"test": "ood", "name": name, "files": files, "classes": classes}
    return Measurement(what, 1 + len(images) / len(subject.images), measure)


def _folder(subject: Subject, root: str) -> tuple[ImageDataset, str]:
    """The images of a folder in the shape of the subject's, and a digest of the files."""
    _, channels, height, width = subject.images.shape
    images = folder_images(root, (height, width), channels)
    return images, files_digest(images.images, root)


def _left_out(images: ImageDataset) -> str:
    return f"; {images.skipped:,} of {len(images):,} files cannot be read and are left out" if images.skipped else ""


class ImageKind:
    """Images in [0, 1] to logits: see :class:`~lightning_tasks.robustness.evaluation.Kind`."""

    def check(self, asked: RobustnessSettings) -> None:
        """Nothing to refuse."""

    def first(self, asked: RobustnessSettings, batch: Batch, room: int | None) -> Batch:
        check_batch(*batch)
        if asked.corrupted:
            require_library(batch[0].shape)
        if any("autoattack" in (setting.name, setting.on_source) for setting in asked.attacks):
            autoattack_library()
        return batch[0][:room], batch[1][:room]

    def plan(self, asked: RobustnessSettings, model: nn.Module, task: Any, trainer: Any, seen: list[Batch]) -> Plan:
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


def _attacks(asked: RobustnessSettings, subject: Subject, task: Any, trainer: Any) -> list[Measurement[Row]]:
    white_box = {setting.at_own_prediction for setting in asked.attacks if setting.attack.white_box}
    measurements = [gradient_measurement(subject, own) for own in sorted(white_box)]
    for setting in asked.attacks:
        if setting.name == "autoattack":
            measurements += [autoattack_measurement(subject, setting, eps) for eps in asked.eps]
            continue
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


def _other_data(asked: RobustnessSettings, subject: Subject, trainer: Any) -> list[Measurement[Row]]:
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


def _wnids(asked: RobustnessSettings, subject: Subject, trainer: Any) -> list[str] | None:
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
