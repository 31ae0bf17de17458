"""Images with a class per pixel, in files, and the data set that transforms both together."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2.functional import pil_to_tensor

from .decoding import open_image
from .images import ImageDataset, in_mode

IGNORED = 255
"""The label of a pixel that does not count."""
_MASK_MODES = ("L", "P", "I;16", "I")


class Scenes(ABC):
    """Images and masks by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        """Image and mask; raises whatever a decoder does where one is damaged."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What a warning calls the image."""

    def mask_name(self, index: int) -> str:
        """What an error calls the mask."""
        return f"the mask of {self.name(index)}"


@dataclass(frozen=True)
class LabelCode:
    """What the numbers in a mask file mean: `first` is class 0, and so on; `ignored` is no class.

    Args:
        num_classes: at most 255.
        first: the number of class 0.
        ignored: the number of pixels that do not count.
    """

    num_classes: int
    first: int
    ignored: int

    def decode(self, mask: Image.Image, size: tuple[int, int], name: str) -> np.ndarray:
        """Classes `[H, W]`, uint8, 255 where a pixel does not count.

        Args:
            mask: the file's content.
            size: width and height of the image.
            name: of the file, for errors.

        Raises:
            ValueError: the mask is coded in colors, has another size than the image, or a label that is no class.
        """
        if mask.mode not in _MASK_MODES:
            raise ValueError(
                f"{name} has mode {mask.mode}{' (colors)' if mask.mode.startswith('RGB') else ''}: a mask has one "
                "number per pixel, its class (mode L or P); save it so"
            )
        if mask.size != size:
            raise ValueError(f"{name} has {_text(mask.size)} pixels, its image {_text(size)}: they must be equal")
        raw = np.asarray(mask)
        last = self.first + self.num_classes - 1
        is_class = (raw >= self.first) & (raw <= last)
        if not (is_class | (raw == self.ignored)).all():
            wrong = raw[~is_class & (raw != self.ignored)].max()
            raise ValueError(
                f"{name} has the label {wrong}: the {self.num_classes} classes are {self.first} to {last}, and "
                f"{self.ignored} does not count"
            )
        return np.where(is_class, raw - self.first, IGNORED).astype(np.uint8)


class FileScenes(Scenes):
    """Images in one folder, masks of the same names (PNG) in another.

    Args:
        images: folder of the images.
        masks: folder of the masks.

    Raises:
        FileNotFoundError: a folder is missing, or an image has no mask, or a mask no image.
        ValueError: there is no image, or two images, or two masks, differ in their suffix only.
    """

    def __init__(self, images: Path, masks: Path) -> None:
        for folder in (images, masks):
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"{folder} is missing: the folder of {'images' if folder == images else 'masks'}"
                )
        found = _by_stem(images, IMG_EXTENSIONS)
        labels = _by_stem(masks, (".png",))
        for name in sorted(found.keys() - labels.keys()):
            count = len(found.keys() - labels.keys())
            raise FileNotFoundError(
                f"{found[name]} has no mask: {masks / name}.png is missing ({count} of {len(found)} are)"
            )
        for name in sorted(labels.keys() - found.keys()):
            raise FileNotFoundError(f"{labels[name]} has no image: {images / name}.* is missing")
        if not found:
            raise ValueError(f"{images} has no images ({', '.join(IMG_EXTENSIONS)}): at least 1 is needed")
        self.images = np.array([str(path) for path in found.values()])
        self.masks = np.array([str(labels[name]) for name in found])

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        image = _open(self.images[index])
        try:
            return image, _open(self.masks[index])
        except Exception as error:  # of any decoder; the warning names the image
            raise OSError(f"its mask {self.masks[index]} cannot be read: {error}") from error

    def name(self, index: int) -> str:
        return str(self.images[index])

    def mask_name(self, index: int) -> str:
        return str(self.masks[index])


def _by_stem(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """The files of these suffixes by their names without it.

    Raises:
        ValueError: two differ in nothing else.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes:
            continue
        if path.stem in found:
            raise ValueError(
                f"{found[path.stem]} and {path.name} have one name: which of them is meant? Remove the other"
            )
        found[path.stem] = path
    return found


class SceneDataset(ImageDataset):
    """Transformed images and masks; item i is (uint8 `[3, H, W]`, uint8 `[H, W]`), None where one cannot be read.

    Args:
        scenes: what is read.
        code: what the numbers in a mask mean.
        transform: takes the two as `tv_tensors` and the image's name, and returns the two.
        is_random, multiple_of: see :class:`.ImageDataset`.
    """

    def __init__(self, scenes: Scenes, code: LabelCode, transform: Any, is_random: bool, multiple_of: int = 1) -> None:
        super().__init__(scenes, transform, 3, is_random, multiple_of)
        self.code = code

    def read(self, index: int) -> Any:
        image, mask = self.images.read(index)
        return in_mode(image, self.mode), mask

    def finish(self, found: Any, index: int) -> tuple[Tensor, Tensor]:
        image, mask = found
        classes = self.code.decode(mask, image.size, self.images.mask_name(index))
        image, labels = tv_tensors.Image(pil_to_tensor(image)), tv_tensors.Mask(torch.from_numpy(classes))
        image, labels = self.transform(image, labels, self.images.name(index))
        return image.as_subclass(Tensor), labels.as_subclass(Tensor)


def unchanged(image: Tensor, mask: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The transform that changes nothing."""
    return image, mask


def collate_scenes(items: Sequence[tuple[Tensor, Tensor] | None], *, size: int) -> tuple[Tensor, Tensor]:
    """Images `[B, 3, H, W]`, float32 in [0, 1], and masks `[B, H, W]`, int64; items that are None are left out.

    Args:
        items: of one size.
        size: H = W of a batch of none.

    Raises:
        ValueError: the images have different sizes.
    """
    read = [item for item in items if item is not None]
    if not read:
        return torch.zeros(0, 3, size, size), torch.zeros(0, size, size, dtype=torch.int64)
    images, masks = zip(*read, strict=True)
    sizes = {tuple(image.shape[1:]) for image in images}
    if len(sizes) > 1:
        raise ValueError(
            f"a batch has images of the sizes {', '.join(f'{h} x {w}' for h, w in sorted(sizes))}: "
            "give eval_batch_size=1"
        )
    return torch.stack(images).float().div_(255), torch.stack(masks).long()


def _open(path: str) -> Image.Image:
    with open_image(path) as image:
        image.load()
        return image


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
