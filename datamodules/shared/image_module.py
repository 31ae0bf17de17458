"""What every data module of images shares: splits read once, loaders that can be resumed, what was left out."""

import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .base import DataModule, check_at_least
from .images import ImageDataset
from .loader import ResumableLoader
from .windows import EpochShuffle

SPLITS = ("train", "validation", "test")
_SPLITS_OF_STAGE = {"fit": SPLITS[:2], "validate": SPLITS[1:2], "test": SPLITS[2:], "predict": SPLITS[2:]}


class ImageDataModule(DataModule):
    """A data module of images in three splits; what a batch is, subclasses say.

    Args:
        batch_size: images per batch and process.
        num_workers: loader processes.

    Raises:
        ValueError: a number is below its limit.
    """

    def __init__(self, batch_size: int, num_workers: int | None) -> None:
        super().__init__(batch_size, num_workers)
        self._images: dict[str, Any] = {}
        self._datasets: dict[str, ImageDataset] = {}

    @abstractmethod
    def load(self, split: str) -> Any:
        """The images of "train", "validation" or "test"; raises where data is missing or does not fit."""

    @abstractmethod
    def check(self, images: Any, split: str) -> None:
        """Raises a ValueError where the images of a split, at least one, do not fit."""

    @abstractmethod
    def dataset(self, split: str, training: bool, multiple_of: int) -> ImageDataset:
        """The transformed images of a split, filled up with None to a multiple."""

    @abstractmethod
    def collate(self, training: bool) -> Callable[[Any], Any]:
        """What makes a batch of items."""

    @abstractmethod
    def draw(self, loader: DataLoader, num_images: int, path: Path) -> Path:
        """Draws the first images of a loader into a PNG file."""

    @property
    def skipped(self) -> dict[str, int]:
        """How many images of each split could not be read so far."""
        return {split: dataset.skipped for split, dataset in self._datasets.items()}

    def images(self, split: str) -> Any:
        """The images of a split, read once.

        Raises:
            ValueError: a split has no images, or some that do not fit.
        """
        if split not in self._images:
            images = self.load(split)
            if not len(images):
                raise ValueError(f"the {split} split has no images: at least 1 is needed")
            self.check(images, split)
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
        """Draws the first images of `split` as the model gets them, with what is known of them, into a PNG file."""
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}: give one of {', '.join(map(repr, SPLITS))}")
        check_at_least("num_images", num_images, 1)
        return self.draw(self._loader(split), num_images, Path(path))

    def order(self, dataset: ImageDataset) -> Any:
        """The order of training images, which has `epoch` and `set_epoch`."""
        return EpochShuffle(dataset)

    def loader_batch_size(self, training: bool) -> int:
        """images per batch and process."""
        return self.batch_size

    def unlabeled(self, images: Any, multiple_of: int) -> tuple[ImageDataset, Callable[[Any], Any], int]:
        """Images without labels as those of the test split: a data set, what makes a batch of its items, its size.

        Raises:
            NotImplementedError: there is no such form.
        """
        raise NotImplementedError(f"{type(self).__name__} has no images without labels")

    def unlabeled_loader(self, images: Any) -> DataLoader:
        """Batches of :class:`.Images` without labels, in their order, as the model gets those of the test split."""
        dataset, collate, batch_size = self.unlabeled(images, self.world_size)
        dataset.named = 20
        return self._loader_of(dataset, collate, batch_size)

    def _loader(self, split: str) -> DataLoader:
        training = split == "train"
        dataset = self.dataset(split, training, multiple_of=1 if training else self.world_size)
        self._datasets[split] = dataset
        sampler = self.order(dataset) if training else None
        return self._loader_of(dataset, self.collate(training), self.loader_batch_size(training), sampler)

    def _loader_of(self, dataset: ImageDataset, collate: Any, batch_size: int, sampler: Any = None) -> DataLoader:
        return ImageLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=self.loader_workers,
            persistent_workers=self.loader_workers > 0,
            pin_memory=self._on_accelerator,
            collate_fn=collate,
        )

    @property
    def _on_accelerator(self) -> bool:
        if self.trainer is None:
            return torch.accelerator.is_available()
        return self.trainer.strategy.root_device.type != "cpu"

    def _counts(self) -> str:
        return ", ".join(f"{split} {len(images):,}" for split, images in self._images.items()) or "not set up"


class ImageLoader(ResumableLoader):
    """A resumable loader of an `ImageDataset`: tells it the epoch, and has it warn of what it could not read."""

    dataset: ImageDataset

    def __iter__(self) -> Any:
        self.dataset.set_epoch(self._order.epoch)
        for batch in super().__iter__():
            self.dataset.warn_of_skipped(growth=2.0)  # soon, and few times
            yield batch
        self.dataset.warn_of_skipped()
