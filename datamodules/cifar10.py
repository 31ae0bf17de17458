"""CIFAR-10 (Krizhevsky 2009), from the hub's parquet files or the original archive."""

import os
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from datamodules.cifar_archive import CLASSES, Pixels, find_archive, read_archive
from datamodules.decoding import open_image
from datamodules.hub import download_parquet, find_shards
from datamodules.images import ArrayImages, in_mode
from datamodules.parquet import count_rows, read_rows
from datamodules.paths import data_root
from datamodules.vision import VisionDataModule, split_indices

REPOSITORY = "uoft-cs/cifar10"
_ROWS = 1000
_SIZE = 32


class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10, 32 x 32 pixels, ten classes, kept in memory.

    Below `root/cifar10` it takes the first that it finds of: `plain_text/{train,test}-XXXXX-of-YYYYY.parquet`, the
    layout of the hub; `cifar-10-batches-bin` or `cifar-10-binary.tar.gz`; `cifar-10-batches-py` or
    `cifar-10-python.tar.gz`, whose pickles are read by an unpickler that builds NumPy arrays and nothing else.
    Validation pictures are held out of train; how many there are follows from the files (50,000 / 10,000 in the
    release).

    Args:
        root: folder with data sets; None for `$ATTNSWAP_DATA`, else the user's cache folder.
        batch_size: pictures a batch and process.
        num_workers: loader processes.
        img_size: pictures are scaled to this where it is not 32.
        in_chans: 3, or 1 for grey.
        val_fraction: share of each class of the train pictures that is held out for validation; 0 trains on all, and
            validates on the test pictures.
        split_seed: draws what is held out; not the seed of the run, so that runs have the same splits.
        train_transform, eval_transform: see :class:`~datamodules.vision.VisionDataModule`; by default crops of
            60% to 100% of the picture, and mirror images.
        download: fetch missing parquet files from the hub into `root`; otherwise they are an error.

    Raises:
        ValueError: `val_fraction` is not in [0, 1), and as :class:`~datamodules.vision.VisionDataModule`.
        NotADirectoryError: `root` is a file.
    """

    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        batch_size: int = 128,
        num_workers: int = 0,
        img_size: int = 32,
        in_chans: int = 3,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        train_transform: dict[str, Any] | None = None,
        eval_transform: dict[str, Any] | None = None,
        download: bool = False,
    ) -> None:
        if train_transform is None:
            train_transform = {"scale": [0.6, 1.0], "color_jitter": 0.0, "interpolation": "bicubic"}
        eval_transform = {"crop_pct": 1.0} if eval_transform is None else eval_transform
        super().__init__(batch_size, num_workers, img_size, in_chans, train_transform, eval_transform)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction!r}: give a number of at least 0 and below 1")
        self.val_fraction, self.split_seed, self.download = val_fraction, split_seed, download
        self.folder = data_root(root) / "cifar10"
        self._read: dict[str, Pixels] = {}

    def prepare_data(self) -> None:
        """Downloads where that was asked for and nothing is there."""
        parquet = self.folder / "plain_text"
        if self.download and find_archive(self.folder) is None and not find_shards(parquet, "train"):
            download_parquet(REPOSITORY, "plain_text", parquet, ("train", "test"))

    def load(self, split: str) -> ArrayImages:
        if split == "test" or (split == "validation" and not self.val_fraction):
            return ArrayImages(*self._release("test"))
        pixels, labels = self._release("train")
        if not self.val_fraction:
            return ArrayImages(pixels, labels)
        train, validation = split_indices(labels, self.val_fraction, self.split_seed)
        chosen = train if split == "train" else validation
        return ArrayImages(pixels[chosen], labels[chosen])

    def _release(self, split: str) -> Pixels:
        """The pictures of the release's "train" or "test"."""
        if split not in self._read:
            shards = find_shards(self.folder / "plain_text", split)
            archive = find_archive(self.folder)
            if shards:
                self._read[split] = read_parquet(shards, f"CIFAR-10: {split}")
            elif archive is not None:
                self._read[split] = read_archive(archive, split)
            else:
                raise FileNotFoundError(
                    f"{self.folder / 'plain_text' / f'{split}-00000-of-00001.parquet'} is missing. Put it there from "
                    f"https://huggingface.co/datasets/{REPOSITORY}/tree/main/plain_text, or cifar-10-binary.tar.gz "
                    f"from https://www.cs.toronto.edu/~kriz/cifar.html into {self.folder}; name another folder as "
                    "root=... or in $ATTNSWAP_DATA, or set download=True"
                )
        return self._read[split]


def read_parquet(files: list[Path], description: str) -> Pixels:
    """Decodes the pictures of parquet files; those that cannot be read are left out, and counted in a warning.

    Raises:
        ValueError: a picture is not 32 x 32, or its label is none of 0 to 9; or none can be read.
    """
    pixels, labels, damaged = [], [], []
    with tqdm(total=sum(map(count_rows, files)), desc=description, unit=" pictures", disable=None) as bar:
        for file in files:
            for rows in read_rows(file, ["img", "label"], _ROWS):
                for row in rows:
                    cell = {} if row["img"] is None else row["img"]
                    if not isinstance(cell, dict):
                        raise ValueError(f"{file} has {type(cell).__name__} in 'img': bytes and path are needed")
                    place = f"{file.name}, {cell.get('path') or f'picture {bar.n}'}"
                    bar.update()
                    try:
                        with open_image(BytesIO(cell["bytes"])) as image:
                            size = image.size[::-1]
                            picture = np.asarray(in_mode(image, "RGB")) if size == (_SIZE, _SIZE) else None
                    except Exception:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
                        damaged.append(place)
                        continue
                    if picture is None:
                        raise ValueError(f"{place}: {size} pixels, where CIFAR-10 has {_SIZE} x {_SIZE}")
                    if type(row["label"]) is not int or not 0 <= row["label"] < CLASSES:  # True is an int, and no class
                        raise ValueError(
                            f"{place}: the label is {row['label']!r}, where CIFAR-10 has integers from 0 to "
                            f"{CLASSES - 1}"
                        )
                    pixels.append(picture)
                    labels.append(row["label"])
    if not pixels:
        raise ValueError(f"none of the {len(damaged)} pictures of {files[0]} can be read: put an intact copy there")
    if damaged:
        warnings.warn(
            f"{description}: {len(damaged):,} of {len(damaged) + len(pixels):,} pictures cannot be read and are left "
            f"out: {'; '.join(damaged[:3])}",
            stacklevel=2,
        )
    return np.stack(pixels), np.array(labels)
