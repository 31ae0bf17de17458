"""Any folder of images, for prediction: no labels, no splits, no layout."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from .image_module import ImageDataModule
from .images import FileImages
from .paths import files_below

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp", "")


class FolderDataModule(LightningDataModule):
    """The images of a folder, at any depth, as another data module prepares those of its test split for the model.

    The data of the other one need not be there. Files count by their suffix, or where they have none; one that cannot
    be read is left out of its batch, and named in a warning.

    Args:
        like: what says how images are prepared.
        folder: the folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it has no images, or `like` is no data module of images.
    """

    def __init__(self, like: Any, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        if not isinstance(like, ImageDataModule):
            raise ValueError(
                f"{type(like).__name__} does not say how images are prepared: give a data module of images, such as "
                "those of attnswap.datamodules"
            )
        self.like = like
        self.images, self.others = find_images(folder)

    def predict_dataloader(self) -> DataLoader:
        self.like.trainer = self.trainer
        return self.like.unlabeled_loader(self.images)


def find_images(folder: str | os.PathLike[str]) -> tuple[FileImages, Counter[str]]:
    """The images of a folder, sorted by path, and how many files it has of each other suffix; hidden ones are left out.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: it, or a folder in it, cannot be listed.
        ValueError: it has no images, or a link leads back to a folder that it lies in.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give a folder of images")
    files = [Path(path) for path in files_below(Path(folder))]
    others = Counter(path.suffix.lower() for path in files if path.suffix.lower() not in SUFFIXES)
    paths = sorted(str(path) for path in files if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} has no images ({', '.join(filter(None, SUFFIXES))}) among its {len(files):,} files")
    return FileImages(paths, [0] * len(paths)), others
