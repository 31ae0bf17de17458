"""What data modules of images with a label each share: timm's transforms, checked labels, a figure of a batch."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader

from .shared.base import check_at_least
from .shared.image_module import ImageDataModule
from .shared.images import MODES, ImageDataset, Images, collate_images
from .shared.show_batch import draw_batch


class VisionDataModule(ImageDataModule):
    """Images with labels: batches are (images `[B, C, H, W]`, float32 in [0, 1], labels `[B]`, int64).

    Images are not normalized: the task does that. Training images come in a new order each epoch, those of the
    other splits in theirs. One that cannot be read is left out of its batch, and counted in a warning at the end of
    the pass. See `docs/data.md`.

    Args:
        batch_size: images per batch and process.
        num_workers: loader processes.
        img_size: H = W in pixels.
        in_chans: C: 3, or 1 for grayscale.
        train_transform: arguments of `timm.data.create_transform` for training, e.g. `{"auto_augment": "rand-m9"}`;
            normalization, mixup and random erasing are the task's.
        eval_transform: the same for the other splits, e.g. `{"crop_pct": 0.9}`.

    Raises:
        ValueError: a number is below its limit, or a transform has arguments that timm does not know or the task has.

    Example:
        >>> from attnswap.datamodules import CIFAR10DataModule, VisionDataModule
        >>> issubclass(CIFAR10DataModule, VisionDataModule)
        True
    """

    class_names: Sequence[str]
    """Names of the classes in the order of their labels, known after `setup` at the latest."""

    def __init__(
        self,
        batch_size: int,
        num_workers: int | None,
        img_size: int,
        in_chans: int,
        train_transform: dict[str, Any] | None,
        eval_transform: dict[str, Any] | None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.img_size = check_at_least("img_size", img_size, 1)
        if in_chans not in MODES:
            raise ValueError(f"in_chans is {in_chans!r}: give 1 (grayscale) or 3 (RGB)")
        self.in_chans = in_chans
        self.eval_transform = dict(eval_transform or {})
        self._transforms = {
            "train": self._transform("train_transform", train_transform, is_training=True),
            "validation": self._transform("eval_transform", eval_transform, is_training=False),
        }

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def check(self, images: Images, split: str) -> None:
        _check_labels(images, self.num_classes, split)

    def dataset(self, split: str, training: bool, multiple_of: int) -> ImageDataset:
        transform = self._transforms["train" if training else "validation"]
        return ImageDataset(self.images(split), transform, self.in_chans, is_random=training, multiple_of=multiple_of)

    def collate(self, training: bool) -> Callable[[Any], tuple[Tensor, Tensor]]:
        return partial(collate_images, shape=(self.in_chans, self.img_size, self.img_size))

    def unlabeled(self, images: Images, multiple_of: int) -> tuple[ImageDataset, Callable[[Any], Any], int]:
        """Labels of their batches are 0, and mean nothing."""
        transform = self._transforms["validation"]
        dataset = ImageDataset(images, transform, self.in_chans, is_random=False, multiple_of=multiple_of)
        return dataset, self.collate(training=False), self.batch_size

    def draw(self, loader: DataLoader, num_images: int, path: Path) -> Path:
        images, labels = [], []
        for batch_images, batch_labels in loader:
            images += list(batch_images)
            labels += batch_labels.tolist()
            if len(images) >= num_images:
                break
        names = [self.class_names[label] for label in labels[:num_images]]
        return draw_batch(images[:num_images], names, path)

    def _transform(self, argument: str, options: dict[str, Any] | None, is_training: bool) -> Any:
        given = dict(options or {})
        for name in ("input_size", "is_training", "normalize", "mean", "std", "re_prob", "use_prefetcher", "separate"):
            if name in given:
                raise ValueError(
                    f"{argument} has {name!r}: the size is img_size=..., and normalization and random erasing belong "
                    "to the task"
                )
        if self.in_chans == 1:
            given.setdefault("color_jitter", 0.0)
        try:
            return create_transform(self.img_size, is_training=is_training, normalize=False, **given)
        except TypeError as error:
            raise ValueError(f"{argument} is {given}: timm.data.create_transform says {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_chans} x {self.img_size} x {self.img_size}, {self._counts()})"

    __str__ = __repr__


def split_indices(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two sorted lists of indices, the second with `fraction` of every class, drawn with `seed`.

    Raises:
        ValueError: there are too few images for one of each class in both.
    """
    from sklearn.model_selection import train_test_split

    everything = np.arange(len(labels))
    try:
        rest, held_out = train_test_split(everything, test_size=fraction, random_state=seed, stratify=labels)
    except ValueError as error:
        raise ValueError(f"{fraction} of {len(labels)} images cannot be held out for validation: {error}") from error
    return np.sort(rest), np.sort(held_out)


def _check_labels(images: Images, num_classes: int, split: str) -> None:
    labels = images.labels
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        wrong = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise ValueError(
            f"the {split} split has labels from {low} to {high}, but {num_classes} classes are known: "
            f"labels must lie in 0 to {num_classes - 1}; the first that does not is {labels[wrong]} of "
            f"{images.name(wrong)}"
        )
