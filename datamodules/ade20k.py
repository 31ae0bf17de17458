"""ADE20K as SceneParse150 has it, and sets of images in its layout."""

import os
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from .segmentation import SegmentationDataModule
from .shared.paths import data_root
from .shared.scenes import FileScenes, LabelCode

NUM_CLASSES = 150
_FOLDERS = {"train": "training", "validation": "validation", "test": "validation"}


class ADE20KDataModule(SegmentationDataModule):
    """ADE20K's 150 classes: 20,210 / 2,000 images; test images are the validation images.

    Reads `root/FOLDER/images/{training,validation}/*.jpg` and `root/FOLDER/annotations/{training,validation}/*.png`,
    the layout of ADEChallengeData2016: label 0 does not count, labels 1 to 150 are classes 0 to 149. Class names are
    those of `root/FOLDER/objectInfo150.txt` where it is there, else numbers. Held-out images keep their own size,
    and so come one per batch.

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        folder: the name of the set below `root`.
        batch_size, num_workers, crop_size, eval_batch_size: see
            :class:`.SegmentationDataModule`.
        train_transform: further arguments of :class:`.TrainTransform`: scale,
            short_side (512 where left out), max_class_share, flip, photometric.

    Raises:
        ValueError: as :class:`.SegmentationDataModule`.
        NotADirectoryError: `root` is a file.
        FileNotFoundError: on setup, where a folder, or one of a pair, is missing.

    Example:
        >>> from attnswap.datamodules import ADE20KDataModule
        >>> data = ADE20KDataModule(root="/data", crop_size=512)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    transform_defaults = MappingProxyType({"short_side": 512})

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        folder: str = "ADEChallengeData2016",
        batch_size: int = 8,
        num_workers: int | None = None,
        crop_size: int = 512,
        eval_batch_size: int | None = 1,
        train_transform: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, crop_size, eval_batch_size, train_transform)
        self.folder = data_root(root) / folder
        self._class_names: Sequence[str] | None = None

    @property
    def class_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the classes in the order of their labels."""
        if self._class_names is None:
            self._class_names = self._read_names()
        return self._class_names

    @property
    def label_code(self) -> LabelCode:
        return LabelCode(NUM_CLASSES, 1, 0)

    def load(self, split: str) -> FileScenes:
        name = _FOLDERS[split]
        try:
            return FileScenes(self.folder / "images" / name, self.folder / "annotations" / name)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. Put ADEChallengeData2016 there (http://sceneparsing.csail.mit.edu); name another place as "
                "root=..., folder=... or in $ATTNSWAP_DATA"
            ) from error

    def _read_names(self) -> Sequence[str]:
        path = self.folder / "objectInfo150.txt"
        if not path.is_file():
            return [f"class {index}" for index in range(NUM_CLASSES)]
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
        if len(rows) != NUM_CLASSES:
            raise ValueError(f"{path} names {len(rows)} classes: {NUM_CLASSES} are needed, below a line of headings")
        return [row[-1].split(",")[0].strip() for row in rows]
