"""What image data modules share: timm's transforms, checked labels, loaders that can be resumed, a picture."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader, SequentialSampler

from datamodules.base import DataModule, check_at_least
from datamodules.images import MODES, ImageDataset, Images, collate_images
from datamodules.loader import ResumableLoader
from datamodules.picture import draw_batch
from datamodules.windows import EpochShuffle

SPLITS = ("train", "validation", "test")
_SPLITS_OF_STAGE = {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:], "predict": SPLITS[2:]}


class VisionDataModule(DataModule):
    """Pictures with labels: batches are (images `[B, C, H, W]`, float32 in [0, 1], labels `[B]`, int64).

    Pictures are not normalised: the task does that. Training pictures come in a new order each epoch, those of the
    other splits in theirs. One that cannot be read is left out of its batch, and counted in a warning at the end of
    the pass. See `docs/data.md`.

    Args:
        batch_size: pictures a batch and process.
        num_workers: loader processes.
        img_size: H = W in pixels.
        in_chans: C: 3, or 1 for grey.
        train_transform: arguments of `timm.data.create_transform` for training, e.g. `{"auto_augment": "rand-m9"}`;
            normalisation, mixup and random erasing are the task's.
        eval_transform: the same for the other splits, e.g. `{"crop_pct": 0.9}`.

    Raises:
        ValueError: a number is below its limit, or a transform has arguments that timm does not know or the task has.
    """

    class_names: Sequence[str]
    """Names of the classes in the order of their labels, known after `setup` at the latest."""

    def __init__(
        self,
        batch_size: int,
        num_workers: int,
        img_size: int,
        in_chans: int,
        train_transform: dict[str, Any] | None,
        eval_transform: dict[str, Any] | None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.img_size = check_at_least("img_size", img_size, 1)
        if in_chans not in MODES:
            raise ValueError(f"in_chans is {in_chans!r}: give 1 (grey) or 3 (RGB)")
        self.in_chans = in_chans
        self._transforms = {
            "train": self._transform("train_transform", train_transform, is_training=True),
            "validation": self._transform("eval_transform", eval_transform, is_training=False),
        }
        self._images: dict[str, Images] = {}
        self._datasets: dict[str, ImageDataset] = {}

    @abstractmethod
    def load(self, split: str) -> Images:
        """The pictures of "train", "validation" or "test"; raises where data is missing or does not fit."""

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def skipped(self) -> dict[str, int]:
        """How many pictures of each split could not be read so far."""
        return {split: dataset.skipped for split, dataset in self._datasets.items()}

    def images(self, split: str) -> Images:
        """The pictures of a split, read once.

        Raises:
            ValueError: a split has no pictures, or a label that is no class.
        """
        if split not in self._images:
            images = self.load(split)
            _check_labels(images, self.num_classes, split)
            self._images[split] = images
        return self._images[split]

    def setup(self, stage: str | None = None) -> None:
        """Reads what `stage` ("fit", "validate", "test", "predict", None for all) needs."""
        if self.trainer is None:
            self.prepare_data()
        for split in _SPLITS_OF_STAGE.get(stage or "", SPLITS):
            self.images(split)

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        return self._loader("test")

    def show_batch(self, path: str | os.PathLike[str], split: str = "train", num_images: int = 16) -> Path:
        """Draws the first pictures of `split` as the model gets them, with their labels, into a PNG file."""
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}: give one of {', '.join(map(repr, SPLITS))}")
        check_at_least("num_images", num_images, 1)
        loader = self._loader(split)
        images, labels = [], []
        for batch_images, batch_labels in loader:
            images += list(batch_images)
            labels += batch_labels.tolist()
            if len(images) >= num_images:
                break
        names = [self.class_names[label] for label in labels[:num_images]]
        return draw_batch(images[:num_images], names, Path(path))

    def _loader(self, split: str) -> DataLoader:
        training = split == "train"
        transform = self._transforms["train" if training else "validation"]
        fill = 1 if training else self.world_size
        dataset = ImageDataset(self.images(split), transform, self.in_chans, is_random=training, multiple_of=fill)
        self._datasets[split] = dataset
        return ImageLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=EpochShuffle(dataset) if training else SequentialSampler(dataset),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self._on_accelerator,
            collate_fn=partial(collate_images, shape=(self.in_chans, self.img_size, self.img_size)),
            generator=torch.Generator(),
        )

    @property
    def _on_accelerator(self) -> bool:
        if self.trainer is None:
            return torch.accelerator.is_available()
        return self.trainer.strategy.root_device.type != "cpu"

    def _transform(self, argument: str, options: dict[str, Any] | None, is_training: bool) -> Any:
        given = dict(options or {})
        for name in ("input_size", "is_training", "normalize", "mean", "std", "re_prob", "use_prefetcher", "separate"):
            if name in given:
                raise ValueError(
                    f"{argument} has {name!r}: the size is img_size=..., and normalisation and random erasing belong "
                    "to the task"
                )
        if self.in_chans == 1:
            given.setdefault("color_jitter", 0.0)
        try:
            return create_transform(self.img_size, is_training=is_training, normalize=False, **given)
        except TypeError as error:
            raise ValueError(f"{argument} is {given}: timm.data.create_transform says {error}") from error

    def __repr__(self) -> str:
        counts = ", ".join(f"{split} {len(images):,}" for split, images in self._images.items()) or "not set up"
        return f"{type(self).__name__}({self.in_chans} x {self.img_size} x {self.img_size}, {counts})"

    __str__ = __repr__


class ImageLoader(ResumableLoader):
    """A resumable loader of an `ImageDataset`: tells it the epoch, and has it warn of what it could not read."""

    dataset: ImageDataset

    def __iter__(self) -> Any:
        self.dataset.set_epoch(self._epoch)
        for batch in super().__iter__():
            self.dataset.warn_of_skipped(growth=2.0)  # soon, and few times
            yield batch
        self.dataset.warn_of_skipped()


def split_indices(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two sorted lists of indices, the second with `fraction` of every class, drawn with `seed`.

    Raises:
        ValueError: there are too few pictures for one of each class in both.
    """
    from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    try:
        rest, held_out = train_test_split(everything, test_size=fraction, random_state=seed, stratify=labels)
    except ValueError as error:
        raise ValueError(f"{fraction} of {len(labels)} pictures cannot be held out for validation: {error}") from error
    return np.sort(rest), np.sort(held_out)


def _check_labels(images: Images, num_classes: int, split: str) -> None:
    labels = images.labels
    if not len(labels):
        raise ValueError(f"the {split} split has no pictures: at least 1 is needed")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        wrong = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise ValueError(
            f"the {split} split has labels from {low} to {high}, but {num_classes} classes are known: "
            f"labels must lie in 0 to {num_classes - 1}; the first that does not is {labels[wrong]} of "
            f"{images.name(wrong)}"
        )
