"""Handwritten digits of scikit-learn: real, on every machine, without a download."""

from typing import Any

import numpy as np

from .shared.images import ArrayImages
from .vision import VisionDataModule, split_indices

_TEST, _VALIDATION = 0.2, 0.125  # of all; of the rest


class DigitsDataModule(VisionDataModule):
    """The 1,797 digits of the UCI test set in scikit-learn, 8 x 8 pixels, ten classes, grayscale.

    Of each class a fifth is for test and an eighth of the rest for validation: 1,257 / 180 / 360 images. Values 0 to
    16 become 0 to 1 (in steps of 1/255).

    Args:
        batch_size: images per batch and process.
        num_workers: loader processes.
        img_size: images are scaled to this where it is not 8.
        in_chans: 1, or 3 for three equal channels.
        split_seed: draws the splits; not the seed of the run, so that runs have the same splits.
        train_transform, eval_transform: see :class:`.VisionDataModule`; no augmentation by default, and no crop
            in evaluation, unless `crop_pct` is given.

    Raises:
        ValueError: as :class:`.VisionDataModule`.

    Example:
        >>> from attnswap.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(batch_size=4)
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader()))[0].shape
        torch.Size([4, 1, 8, 8])
    """

    class_names = tuple("0123456789")

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        img_size: int = 8,
        in_chans: int = 1,
        split_seed: int = 0,
        train_transform: dict[str, Any] | None = None,
        eval_transform: dict[str, Any] | None = None,
    ) -> None:
        train_transform = {"no_aug": True} if train_transform is None else train_transform
        eval_transform = {"crop_pct": 1.0, **(eval_transform or {})}
        super().__init__(batch_size, num_workers, img_size, in_chans, train_transform, eval_transform)
        self.split_seed = split_seed

    def load(self, split: str) -> ArrayImages:
        from sklearn.datasets import load_digits

        digits = load_digits()
        rest, test = split_indices(digits.target, _TEST, self.split_seed)
        train, validation = split_indices(digits.target[rest], _VALIDATION, self.split_seed)
        chosen = {"train": rest[train], "validation": rest[validation], "test": test}[split]
        pixels = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        return ArrayImages(pixels, digits.target[chosen])
