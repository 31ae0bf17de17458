"""The released images of ImageNet-C: folders CORRUPTION/SEVERITY/CLASS, read as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention_modules.precision import to_float64
from lightning_tasks.robustness.class_folders import class_subset, folder_images
from lightning_tasks.robustness.subject import Subject
from lightning_tasks.runs.measurements import Advance, Measurement
from lightning_tasks.runs.robustness import Row

if TYPE_CHECKING:
    from attnswap.datamodules.shared.images import Images


def released_folder(root: str | Path, name: str, severity: int) -> Path:
    """The folder of a corruption and severity, ``root/NAME/SEVERITY``, also below one of the release's five archives.

    Raises:
        ValueError: if there is none.
    """
    root = Path(root)
    places = [root / name / str(severity), *sorted(root.glob(f"*/{name}/{severity}"))]
    for place in places:
        if place.is_dir():
            return place
    raise ValueError(
        f"imagenet_c: {root} has no folder {name}/{severity}: give the released ImageNet-C, folders "
        "CORRUPTION/SEVERITY/CLASS, or leave this one out of corruptions or severities"
    )


def released_measurement(
    subject: Subject,
    root: str,
    name: str,
    severity: int,
    wnids: Sequence[str],
    transform: Mapping[str, Any],
    most: int | None = None,
) -> Measurement[Row]:
    """Accuracy among all classes on the released images of a corruption and severity.

    Images of the model's size are not touched: those of the release have 224 x 224 pixels. Others are resized whole.

    Args:
        subject: the classifier.
        root: the folder of ImageNet-C.
        name, severity: the corruption.
        wnids: the model's class names, in the order of its logits.
        transform: how the model's own evaluation resizes (its `interpolation` counts).
        most: how many images count, evenly chosen; all where None.

    Raises:
        ValueError: if the folder is not there, or has a class that the model has not.
    """
    folder = released_folder(root, name, severity)
    classes = torch.tensor(class_subset(folder, wnids))
    _, channels, height, width = subject.images.shape
    resized = {**transform, "crop_pct": 1.0}
    images = folder_images(folder, (height, width), channels, transform=resized)
    places = torch.linspace(0, len(images) - 1, min(most or len(images), len(images))).round().long().tolist()

    def measure(advance: Advance) -> list[Row]:
        logits, labels = subject.labeled_logits(images, places, advance)
        right = to_float64(logits.argmax(1) == classes[labels]).mean().item()
        note = f"released images of {len(classes)} classes"
        return [Row("corruption", name, str(severity), "accuracy", right, len(labels), note=note)]

    what: dict[str, Any] = {"test": "corruption", "name": name, "severity": severity, "resized": resized}
    what |= {"files": _digest(images.images, folder), "classes": classes.tolist(), "count": len(places)}
    lines = [("corruption", name, str(severity), "accuracy")]
    return Measurement(what, len(places) / len(subject.images), measure, lines)


def _digest(images: Images, root: Path) -> str:
    """Changes with names and sizes of the files: to read the contents of 3.75 million takes hours."""
    digest = hashlib.sha256()
    for index in range(len(images)):
        path = Path(images.name(index))
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()
