"""What a test says of each image: kept for each cell, and the interval of a difference over resampled images."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional

from lightning_tasks.compare.statistics import percentile_interval, resampled_sums
from lightning_tasks.compare.summary import ImageInterval, SummaryRow
from lightning_tasks.errors import UsageError
from lightning_tasks.files.digests import update_digest
from lightning_tasks.runs.robustness import CORRUPTIONS, right_from_text
from lightning_tasks.runs.run import read_robustness
from lightning_tasks.runs.safe_files import MOST_TABLE_BYTES, refuse_foreign, written_whole
from lightning_tasks.training.segmentation_metrics import (
    SCORES,
    SegmentationScores,
    class_counts,
    scores_of_counts,
)

FILE, ROBUSTNESS_FILE = "images.npz", "robustness_images.npz"
PIXELS = "class_pixels"
MEAN_CORRUPTION = "robustness/mean_corruption/accuracy"
TOP_K = 5
Values = Mapping[str, np.ndarray]


class RecordImages(Callback):
    """Keep what a test in one process says of each image of its first loader, in the order of the loader.

    Of an :class:`~lightning_tasks.image_classification.ImageClassificationTask` whether the label is the most likely
    class (`top1`) and among the five most likely (`top5`), and its cross-entropy (`loss`); of a
    :class:`~lightning_tasks.segmentation.SegmentationTask` the image's pixels of each class: found, there, predicted.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []
        self._digest = hashlib.sha256()

    @property
    def values(self) -> dict[str, np.ndarray]:
        """By name what was kept, a row per image, with a digest of images and targets as `data`; {} of other tasks."""
        if not self._parts:
            return {}
        joined = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        return {
            "data": np.array(self._digest.hexdigest()),
            **{name: each.cpu().numpy() for name, each in joined.items()},
        }

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep a batch."""
        measure = _measure_of(pl_module)
        if not isinstance(outputs, Tensor):  # of a test step of somebody's own
            return
        if measure is None or dataloader_idx or trainer.world_size > 1 or not len(batch[1]):
            return
        self._parts.append(measure(outputs.detach(), batch[1]))
        for tensor in batch:
            update_digest(self._digest, tensor)


def _measure_of(task: Any) -> Callable[[Tensor, Tensor], dict[str, Tensor]] | None:
    """What makes values of each image of what the task's test step returns, and the targets; None for other tasks."""
    from lightning_tasks.image_classification import ImageClassificationTask  # with the tasks come timm and metrics
    from lightning_tasks.segmentation import SegmentationTask

    if isinstance(task, ImageClassificationTask):
        return _classified
    if isinstance(task, SegmentationTask):
        metric = SegmentationScores(int(task.hparams["num_classes"]), task.hparams["ignore_index"])
        return lambda masks, targets: {PIXELS: _class_pixels(metric.to(masks.device), masks, targets)}
    return None


def _classified(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    found = {"top1": logits.softmax(-1).argmax(-1) == labels}
    if logits.shape[1] > TOP_K:
        found["top5"] = (logits.topk(TOP_K).indices == labels[:, None]).any(-1)
    return {**found, "loss": functional.cross_entropy(logits, labels, reduction="none")}


def _class_pixels(metric: SegmentationScores, masks: Tensor, targets: Tensor) -> Tensor:
    """Pixels of each image and class, ``[B, 3, K]``, as :func:`class_counts` has them."""
    found = []
    for mask, target in zip(masks, targets, strict=True):
        metric.update(mask[None], target[None])
        found.append(class_counts(metric.compute()).to(torch.int32))
        metric.reset()
    return torch.stack(found)


def robustness_values(folder: Path, tested: Values) -> dict[str, np.ndarray]:
    """Whether each image was right in the rows of a run's robustness table that say so, by the name that is logged.

    The mean corruption has the share of its corruptions. `tested` is what :class:`RecordImages` kept, of which the
    images are the first.

    Raises:
        UsageError: the table cannot be read.
    """
    rows = [row for row in read_robustness(folder) if row.right and row.test in ("clean", "attack", "corruption")]
    found: dict[str, np.ndarray] = {row.label: right_from_text(row.right, row.samples) for row in rows}
    if corrupted := [found[row.label] for row in rows if row.test == "corruption" and row.name in CORRUPTIONS]:
        found[MEAN_CORRUPTION] = np.stack(corrupted).mean(axis=0, dtype=np.float32)
    return {"data": tested["data"], **found} if found and "data" in tested else {}


def write_images(values: Values, path: Path) -> None:
    """Write what :class:`RecordImages` kept, whole or not at all; nothing where that is nothing."""
    if values:
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **values)


def read_images(path: Path, folder: Path) -> dict[str, np.ndarray]:
    """What :func:`write_images` wrote; {} where there is no such file.

    Raises:
        UsageError: it is damaged, too large, or a link out of `folder`.
    """
    if not path.is_file():
        return {}
    refuse_foreign(path, folder)
    try:
        with zipfile.ZipFile(path) as parts:
            if sum(part.file_size for part in parts.infolist()) > MOST_TABLE_BYTES:
                raise ValueError(f"it unpacks to more than {MOST_TABLE_BYTES:,} bytes")
        with np.load(path, allow_pickle=False) as found:
            values = dict(found)
        if len({len(each) for name, each in values.items() if name != "data"} | {0}) != 2 or "data" not in values:
            raise ValueError("it has not one value per image")
        for name, each in values.items():
            _check_values(name, each)
    except Exception as error:  # zlib, zipfile and numpy raise a dozen of kinds
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return values


def _check_values(name: str, values: np.ndarray) -> None:
    """Check the kind and the shape of what is kept under a name.

    Raises:
        ValueError: they are others than :class:`RecordImages` and :func:`robustness_values` give.
    """
    kinds, ndim = ("U", 0) if name == "data" else ("iu", 3) if name == PIXELS else ("bf", 1)
    if values.dtype.kind not in kinds or values.ndim != ndim or (name == PIXELS and values.shape[1] != 3):
        raise ValueError(f"{name} is {values.dtype} of the shape {list(values.shape)}")


class ImageResults:
    """The values of images of finished cells, read when they are asked for.

    Args:
        folders: of each finished cell, by configuration and seed; the files need not be there.
        folder: that of the comparison.
    """

    def __init__(self, folders: Mapping[tuple[str, int], Path], folder: Path) -> None:
        self.folders = folders
        self.folder = folder
        self.notes: dict[str, None] = {}
        self._resampled: dict[tuple[str, int], np.ndarray] = {}

    def intervals(self, summary: Sequence[SummaryRow]) -> list[ImageInterval]:
        """Those of the rows whose cells all have the values of one metric for the same images; `notes` say why not."""
        if not any(self._values.values()):
            return []
        found: list[ImageInterval] = []
        linear: dict[int, list[tuple[int, np.ndarray]]] = {}  # by number of images: place in `found`, differences
        for row in summary:
            name = row.metric.removeprefix("test/")
            if not row.metric.startswith(("test/", "robustness/")):
                continue
            if not row.reference or row.diverged or row.reference_diverged:
                continue
            seeds = [
                seed for config, seed in self.folders if config == row.config and (row.reference, seed) in self.folders
            ]
            if not seeds or name not in self._known or not self._whole(row, seeds, name):
                continue
            images = len(self._values[row.config, seeds[0]][_kept(name)])
            interval = ImageInterval(row.metric, row.config, row.reference, images, len(seeds))
            if name in SCORES:
                draws = [self._scores(row.config, seed) - self._scores(row.reference, seed) for seed in seeds]
                interval = _with(interval, np.mean(draws, axis=0)[:, SCORES.index(name)])
            else:
                pairs = [[self._values[each, seed][name] for each in (row.config, row.reference)] for seed in seeds]
                difference = np.mean([own.astype(np.float64) - other for own, other in pairs], axis=0)
                linear.setdefault(images, []).append((len(found), difference))
            found.append(interval)
        for images, rows in linear.items():  # drawn once for all of them
            means = resampled_sums(np.stack([difference for _, difference in rows], 1)) / images
            for (place, _), of_row in zip(rows, means.T, strict=True):
                found[place] = _with(found[place], of_row)
        return found

    @cached_property
    def _values(self) -> Mapping[tuple[str, int], Values]:
        found: dict[tuple[str, int], dict[str, np.ndarray]] = {key: {} for key in self.folders}
        for key, place in self.folders.items():
            for name in (FILE, ROBUSTNESS_FILE):
                try:
                    found[key] |= read_images(place / name, self.folder)
                except UsageError as error:
                    self.notes[str(error)] = None
        return found

    @cached_property
    def _known(self) -> set[str]:
        """The names for which any cell has values."""
        kept = {name for values in self._values.values() for name in values} - {"data"}
        return (kept - {PIXELS}) | ({*SCORES} if PIXELS in kept else set())

    def _whole(self, row: SummaryRow, seeds: Sequence[int], name: str) -> bool:
        each = [self._values[config, seed] for seed in seeds for config in (row.config, row.reference)]
        of = f"{row.config} and {row.reference}"
        if any(_kept(name) not in values for values in each):
            self.notes[f"{of}: not every run has {_kept(name)} of its images"] = None
        elif len({(str(values["data"]), values[_kept(name)].shape) for values in each}) > 1:
            self.notes[f"{of}: their runs were not tested on the same images, in the same order"] = None
        else:
            return True
        return False

    def _scores(self, config: str, seed: int) -> np.ndarray:
        """The scores of the summed pixels of each draw of images, ``[draws, scores]``."""
        if (config, seed) not in self._resampled:
            pixels = self._values[config, seed][PIXELS]
            sums = resampled_sums(pixels.reshape(len(pixels), -1))
            scores = scores_of_counts(torch.from_numpy(sums).view(len(sums), *pixels.shape[1:]))
            self._resampled[config, seed] = scores.numpy()
        return self._resampled[config, seed]


def _with(interval: ImageInterval, draws: np.ndarray) -> ImageInterval:
    low, high = percentile_interval(draws)
    return replace(interval, low=low, high=high)


def _kept(name: str) -> str:
    return PIXELS if name in SCORES else name
