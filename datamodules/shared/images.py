"""Images with labels, in memory, in files or in parquet shards, and the data set that transforms them."""

import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from .decoding import open_image
from .hub import count_rows
from .repeated import Again

MODES = {1: "L", 3: "RGB"}


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in "L" or "RGB"; 16 bits are scaled to 8 (Pillow alone cuts values off at 255).

    Raises:
        ValueError: it has numbers whose range is not known: floats, or integers beyond 16 bits.
    """
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError(f"values of mode {image.mode} from {values.min()} to {values.max()}: give 8 or 16 bits")
        image = Image.fromarray(np.rint(values / 257).astype(np.uint8))
    return image.convert(mode)


def whole_labels(labels: Any) -> np.ndarray:
    """Labels as int64, `[images]`.

    Raises:
        ValueError: one is no whole number (a cast would make 0.5 class 0, and NaN any), or they are no list of numbers.
    """
    given = np.asarray(labels)
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise ValueError(f"labels are {given.dtype} of shape {list(given.shape)}: give one integer for each image")
    if given.dtype.kind == "f":
        wrong = np.flatnonzero(~(np.isfinite(given) & (given == np.rint(given))))
        if len(wrong):
            raise ValueError(
                f"image {wrong[0]} has label {given[wrong[0]]}, which is no whole number ({len(wrong):,} of "
                f"{len(given):,} labels are none): give the number of a class"
            )
    return given.astype(np.int64)


class Images(ABC):
    """Images by index.

    Args:
        labels: the class of each, `[images]`, whole numbers.

    Raises:
        ValueError: a label is no whole number.
    """

    def __init__(self, labels: Any) -> None:
        self.labels = whole_labels(labels)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """The image; raises whatever its decoder does where it is damaged."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What a warning calls it."""


class ArrayImages(Images):
    """Images in memory.

    Args:
        pixels: `[images, H, W]` or `[images, H, W, 3]`, uint8.
        labels: the class of each.
    """

    def __init__(self, pixels: np.ndarray, labels: Any) -> None:
        super().__init__(labels)
        self.pixels = pixels

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def name(self, index: int) -> str:
        return f"image {index}"  # as `attnswap predict` writes it into its table


class FileImages(Images):
    """Images in files.

    Args:
        paths: the files.
        labels: the class of each.
    """

    def __init__(self, paths: Sequence[str], labels: Any) -> None:
        super().__init__(labels)
        # One object to share with the workers, not a million, of a byte a letter.
        self.paths = np.array([os.fsencode(path) for path in paths])

    def read(self, index: int) -> Image.Image:
        with open_image(self.name(index)) as image:
            image.load()
            return image

    def name(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class ParquetImages(Images):
    """Images in parquet files of the hub, copied once to a memory map by the library `datasets`, with its bar.

    Args:
        files: the shards in order, with a struct {bytes, path} for each image.
        image, label: names of the columns.
        cache: folder for the memory map.

    Raises:
        ValueError: a file is damaged, a column is missing, or an image has no label, or one that is no integer.
    """

    def __init__(self, files: Sequence[Path], image: str, label: str, cache: Path) -> None:
        import datasets
        import pyarrow

        for path in files:
            count_rows(path)  # names a damaged file, which the library does not
        try:
            rows = datasets.Dataset.from_parquet([str(path) for path in files], cache_dir=str(cache))
        except Exception as error:  # of pyarrow, of the features that a file names, of the disk
            raise _unreadable(files, error) from error
        for column in (image, label):
            if column not in rows.column_names:
                raise ValueError(f"{files[0]} has the columns {rows.column_names}: {column!r} is needed")
        labels = rows.data.column(label)
        if not pyarrow.types.is_integer(labels.type):
            raise ValueError(f"{files[0]} has {labels.type} in the column {label!r}: integers are needed")
        if labels.null_count:
            raise ValueError(f"{files[0]} and its like have {labels.null_count} images without a label")
        super().__init__(labels.to_numpy())
        self.class_names: list[str] | None = getattr(rows.features[label], "names", None)
        try:
            self._rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        except Exception as error:  # of pyarrow: the column holds something else than images
            raise _unreadable(files, error) from error
        self._column = image

    def read(self, index: int) -> Image.Image:
        with open_image(BytesIO(self._rows[int(index)][self._column]["bytes"])) as image:
            image.load()
            return image

    def name(self, index: int) -> str:
        cell = self._rows.data.column(self._column)[int(index)]  # straight from the map, without the pixels
        return str(cell["path"].as_py() or f"row {index}")


def _unreadable(files: Sequence[Path], error: Exception) -> ValueError:
    others = f" and {len(files) - 1} like it" if len(files) > 1 else ""
    reason = error.__cause__ or error  # the library says only that there was an error
    return ValueError(f"{files[0]}{others} cannot be read as images: {type(reason).__name__}: {reason}")


class ImageDataset(Dataset):
    """Transformed images; item i is (uint8 `[C, H, W]`, label), or None where image i cannot be read.

    What is random in the transform depends on the seed of `seed_everything`, the epoch and the index alone: neither
    the number of workers, nor what the model draws, nor a resumed run changes it.

    Args:
        images: what is read, :class:`Images` here.
        transform: PIL image to uint8 `[C, H, W]`.
        in_chans: C, 1 or 3; images of other modes are converted, of 16 bits scaled to 8.
        is_random: whether the transform draws random numbers.
        multiple_of: items are filled up with None to a multiple of this (so that each of several processes gets
            equally many, none twice).
    """

    named = 3
    """How many images that cannot be read a warning names."""

    def __init__(
        self,
        images: Any,
        transform: Callable[..., Any],
        in_chans: int,
        is_random: bool,
        multiple_of: int = 1,
    ) -> None:
        self.images, self.transform, self.mode = images, transform, MODES[in_chans]
        self.is_random = is_random
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._length = -(-len(images) // multiple_of) * multiple_of
        # Shared with the workers, which live on from one epoch to the next.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._damaged = torch.zeros(len(images), dtype=torch.bool).share_memory_()
        self._warned = 0

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Selects the random numbers of `epoch`."""
        self._epoch.fill_(epoch)

    @property
    def skipped(self) -> int:
        """How many different images could not be read so far, by this process and its workers."""
        return int(self._damaged.sum())

    def warn_of_skipped(self, growth: float = 1.0) -> None:
        """Warns where more images than at the last warning, and `growth` times as many, could not be read.

        Raises:
            ValueError: none of the images could be read.
        """
        count, size = self.skipped, len(self.images)
        if count <= self._warned or count < growth * self._warned:
            return
        self._warned = count
        names = ", ".join(self.images.name(int(index)) for index in self._damaged.nonzero()[: self.named])
        if count == size:
            raise ValueError(
                f"none of the {size:,} images can be read, e.g. {names}: is the data still there, and whole?"
            )
        first = int(self._damaged.nonzero()[0])
        warnings.warn(
            f"{count:,} of {size:,} images cannot be read and are left out: {names} (the first: {self._why(first)})",
            stacklevel=2,
        )

    def _why(self, index: int) -> str:
        try:
            self.read(index)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it can be read now"

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int] | None]:
        """Items of a batch; the global random states are put back once, after the last."""
        if not self.is_random:
            return [self._item(index) for index in indices]
        epoch = int(self._epoch)
        with isolate_rng(include_cuda=False):
            return [self._item(index, epoch) for index in indices]

    def _item(self, index: int, epoch: int | None = None) -> tuple[Tensor, int] | None:
        if index >= len(self.images):
            return None
        try:
            found = self.read(index)
        except Exception:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
            self._damaged[index] = True
            return None
        if epoch is not None:
            again = (index.repeat,) if isinstance(index, Again) else ()
            seed = hash((self.seed, epoch, index, *again)) % 2**32  # of integers: the same in every process
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 - timm's transforms draw from the global state
            torch.default_generator.manual_seed(seed)
        return self.finish(found, index)

    def read(self, index: int) -> Any:
        """What is read of image `index`; it counts as damaged where this raises."""
        return in_mode(self.images.read(index), self.mode)

    def finish(self, found: Any, index: int) -> tuple[Tensor, Any]:
        """The item of what was read."""
        return self.transform(found), int(self.images.labels[index])


def collate_images(items: Sequence[tuple[Tensor, int] | None], *, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Images `[B, *shape]`, float32 in [0, 1], and labels `[B]`, int64; items that are None are left out."""
    read = [item for item in items if item is not None]
    if not read:
        return torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64)
    images, labels = zip(*read, strict=True)
    return torch.stack(images).float().div_(255), torch.tensor(labels)
