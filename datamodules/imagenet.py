"""ImageNet-1k and sets of images in its layouts: one folder per class, or the hub's parquet files."""

import difflib
import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import ImageNetInfo

from .shared.base import check_at_least
from .shared.hub import find_shards
from .shared.images import FileImages, ImageDataset, Images, ParquetImages
from .shared.paths import cache_root, class_folders, class_images, data_root
from .shared.repeated import RepeatedAugmentation
from .vision import VisionDataModule

REPOSITORY = "ILSVRC/imagenet-1k"
_WNID = re.compile(r"n\d{8}")
_CHECKED_ROWS = 2000


class ImageNetDataModule(VisionDataModule):
    """ImageNet, or any images in one of its two layouts; test images are the validation images.

    A folder per class (`torchvision.datasets.ImageFolder`): `root/FOLDER/{train,val}/CLASS/*.JPEG`, labels in the order
    of the sorted class names; images in sub-folders of a class count too. Or the hub's:
    `root/FOLDER/data/{train,validation}-XXXXX-of-YYYYY.parquet` with the columns `image` and `label`, which the library
    `datasets` copies once to a memory map in the cache. The number of classes follows from the data. Where there are
    1,000 of them with WordNet ids, these must be ImageNet-1k's, so that labels mean what pretrained models mean.

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        folder: the name of the set below `root`.
        train, val: sub-folders with the splits, in the first layout.
        batch_size: images per batch and process.
        num_workers: loader processes; None for the available cores, shared by the processes that train.
        img_size: H = W in pixels.
        in_chans: 3, or 1 for grayscale.
        train_transform, eval_transform: see :class:`.VisionDataModule`; timm's by default.
        repeats: how often an image comes in a step's batches, each time augmented anew; 3 in DeiT, 1 for none.
        cache_dir: folder for the memory map of the second layout; None for `$ATTNSWAP_CACHE`, else the user's cache.

    Raises:
        ValueError: as :class:`.VisionDataModule`; on setup, if the class names of the splits differ,
            or 1,000 WordNet ids are not those of ImageNet-1k in its order.
        NotADirectoryError: `root` or `cache_dir` is a file.
        FileNotFoundError: on setup, where no layout is found; the text says what was looked for.

    Example:
        >>> from attnswap.datamodules import ImageNetDataModule
        >>> data = ImageNetDataModule(root="/data", img_size=224)
        >>> data.prepare_data()  # says which files it looked for, and where to get them  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        folder: str = "imagenet",
        train: str = "train",
        val: str = "val",
        batch_size: int = 256,
        num_workers: int | None = None,
        img_size: int = 224,
        in_chans: int = 3,
        train_transform: dict[str, Any] | None = None,
        eval_transform: dict[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        repeats: int = 1,
    ) -> None:
        train_transform = {"interpolation": "bicubic", **(train_transform or {})}
        eval_transform = {"interpolation": "bicubic", **(eval_transform or {})}
        super().__init__(batch_size, num_workers, img_size, in_chans, train_transform, eval_transform)
        self.folder = data_root(root) / folder
        self.cache_dir = cache_root(cache_dir)
        self.repeats = check_at_least("repeats", repeats, 1)
        self._places = {"train": self.folder / train, "validation": self.folder / val}
        self._mapped: dict[str, ParquetImages] = {}
        self._class_names: Sequence[str] | None = None

    @property
    def class_names(self) -> Sequence[str]:  # type: ignore[override]
        """Names of the classes in the order of their labels."""
        if self._class_names is None:
            self._class_names = self._find_classes()
        return self._class_names

    @property
    def wnids(self) -> Sequence[str] | None:
        """The WordNet ids in the order of the labels; None where the classes have other names."""
        return self.class_names if all(_WNID.fullmatch(name) for name in self.class_names) else None

    def prepare_data(self) -> None:
        """Copies parquet files to a memory map, once, in one process."""
        if not self._in_folders:
            for split in ("train", "validation"):
                self._parquet(split)

    def order(self, dataset: ImageDataset) -> Any:
        if self.repeats == 1:
            return super().order(dataset)
        rank = 0 if self.trainer is None else self.trainer.global_rank
        return RepeatedAugmentation(dataset, self.repeats, self.world_size, rank)

    def load(self, split: str) -> Images:
        if split == "test":
            return self.images("validation")
        return self._files(split) if self._in_folders else self._parquet(split)

    @property
    def _in_folders(self) -> bool:
        """Which of the two layouts is there.

        Raises:
            FileNotFoundError: neither is.
        """
        missing = [place for place in self._places.values() if not place.is_dir()]
        if not missing:
            return True
        if self._shards("train") and self._shards("validation"):
            return False
        raise FileNotFoundError(
            f"{missing[0]} is missing, and so is {self.folder / 'data' / 'train-00000-of-YYYYY.parquet'} or its twin "
            f"for validation. Put class folders there, or the files of https://huggingface.co/datasets/{REPOSITORY} "
            "(its terms must be accepted first); name another folder as root=..., folder=... or in $ATTNSWAP_DATA"
        )

    def _find_classes(self) -> Sequence[str]:
        if self._in_folders:
            classes = {split: class_folders(place) for split, place in self._places.items()}
            check_same_classes(
                self._places["train"], classes["train"], self._places["validation"], classes["validation"]
            )
            names = classes["train"]
        else:
            train, validation = self._parquet("train"), self._parquet("validation")
            if train.class_names and validation.class_names:
                check_same_names(self._shards("validation")[0], train.class_names, validation.class_names)
            names = train.class_names or [str(label) for label in range(_class_count(train))]
        check_wnids(names)
        return names

    def _files(self, split: str) -> FileImages:
        return FileImages(*class_images(self._places[split], self.class_names, f"{self.folder.name}: {split} files"))

    def _shards(self, split: str) -> list[Path]:
        return find_shards(self.folder / "data", split) or find_shards(self.folder, split)

    def _parquet(self, split: str) -> ParquetImages:
        if split not in self._mapped:
            self._mapped[split] = ParquetImages(self._shards(split), "image", "label", self.cache_dir / "imagenet")
            check_paths(self._mapped[split])
        return self._mapped[split]


def check_same_classes(train: Path, train_classes: Sequence[str], val: Path, val_classes: Sequence[str]) -> None:
    """Raises a ValueError where two splits do not have the same class folders, with their names."""
    for place, other, lacking in (
        (train, val, sorted(set(val_classes) - set(train_classes))),
        (val, train, sorted(set(train_classes) - set(val_classes))),
    ):
        if lacking:
            raise ValueError(
                f"{place} lacks {len(lacking)} class folders that {other} has ({_some(lacking)}): "
                "the splits must have the same, or their labels would not mean the same"
            )


def check_same_names(path: Path, train: Sequence[str], val: Sequence[str]) -> None:
    """Raises a ValueError where the labels of two splits, that in `path` the second, do not have the same names."""
    for label, (first, second) in enumerate(zip_longest(train, val, fillvalue="nothing")):
        if first != second:
            raise ValueError(
                f"{path} calls label {label} {second!r}, the training files {first!r}: the splits must have the same "
                "class names in the same order"
            )


def check_wnids(names: Sequence[str]) -> None:
    """Raises a ValueError where 1,000 classes are named by WordNet ids that are not ImageNet-1k's, in its order."""
    known = ImageNetInfo("imagenet-1k").label_names()
    if len(names) != len(known) or not all(_WNID.fullmatch(name) for name in names) or list(names) == known:
        return
    wrong = sorted(set(names) - set(known))
    if not wrong:
        label = next(label for label, name in enumerate(names) if name != known[label])
        raise ValueError(
            f"label {label} is called {names[label]}, and in ImageNet-1k it is {known[label]}: labels must be in the "
            "order of the sorted WordNet ids"
        )
    nearest = difflib.get_close_matches(wrong[0], sorted(set(known) - set(names)), n=1)
    raise ValueError(
        f"1,000 classes, but {len(wrong)} are no classes of ImageNet-1k ({_some(wrong)}"
        f"{f'; is {wrong[0]} meant to be {nearest[0]}?' if nearest else ''}): labels would not mean what they mean to "
        "pretrained models"
    )


def check_paths(images: ParquetImages) -> None:
    """Raises a ValueError where the WordNet id in an image's path is not that of its label.

    Up to 2,000 rows are looked at, evenly spread, and only where there are 1,000 classes and paths with ids.
    """
    known = ImageNetInfo("imagenet-1k").label_names()
    if _class_count(images) != len(known):
        return
    for index in np.unique(np.linspace(0, len(images) - 1, _CHECKED_ROWS).astype(int)) if len(images) else ():
        found = _WNID.search(images.name(index))
        label = int(images.labels[index])
        if found and 0 <= label < len(known) and found[0] != known[label]:
            raise ValueError(
                f"{images.name(index)} has label {label}, which is {known[label]} in ImageNet-1k: labels must be in "
                "the order of the sorted WordNet ids"
            )


def _class_count(images: ParquetImages) -> int:
    """How many classes there are, by their names, else by the labels."""
    return len(images.class_names or range(int(images.labels.max(initial=-1)) + 1))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
