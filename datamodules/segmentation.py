"""What data modules of images with a class per pixel share."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms.v2.functional import pil_to_tensor

from .shared.base import check_at_least
from .shared.image_module import ImageDataModule
from .shared.images import ImageDataset, Images, collate_images
from .shared.scene_transform import TrainTransform
from .shared.scenes import IGNORED, LabelCode, SceneDataset, Scenes, collate_scenes, unchanged
from .shared.show_batch import draw_batch, paint

_CHECKED = 5


class SegmentationDataModule(ImageDataModule):
    """Images with a class per pixel.

    Batches are (images `[B, 3, H, W]`, float32 in [0, 1], masks `[B, H, W]`, int64). Masks hold classes 0, 1, ...
    and 255 where a pixel does not count. Training images are scaled, cropped, flipped and distorted together with
    their masks, in a new order each epoch; those of the other splits keep their size. One that cannot be read is left
    out of its batch, and counted in a warning. See `docs/data.md`.

    Args:
        batch_size: training images per batch and process.
        num_workers: loader processes.
        crop_size: H = W of training images, in pixels.
        eval_batch_size: images per batch in the other splits; None for `batch_size`. 1 where they differ in size.
        train_transform: further arguments of :class:`.TrainTransform`: scale,
            short_side, max_class_share, flip, photometric.

    Raises:
        ValueError: a number is out of its limits; on setup and when an image is read, if its mask has another size, is
            coded in colors or has a label that is no class, or the crop is larger; the text names the file.

    Example:
        >>> from attnswap.datamodules import CamVidDataModule, SegmentationDataModule
        >>> issubclass(CamVidDataModule, SegmentationDataModule)
        True
    """

    class_names: Sequence[str]
    """Names of the classes in the order of their labels, known after `setup` at the latest."""
    ignore_index = IGNORED
    transform_defaults: Mapping[str, Any] = MappingProxyType({})
    """What `train_transform` holds where it does not say so."""

    def __init__(
        self,
        batch_size: int,
        num_workers: int | None,
        crop_size: int,
        eval_batch_size: int | None,
        train_transform: dict[str, Any] | None,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if eval_batch_size is not None:
            check_at_least("eval_batch_size", eval_batch_size, 1)
        self.crop_size, self.eval_batch_size = crop_size, eval_batch_size
        if not isinstance(train_transform, Mapping | None):
            raise ValueError(f"train_transform is {train_transform!r}: give its keys and values, {{'flip': 0.5}}")
        try:
            self._train_transform = TrainTransform(crop_size, **{**self.transform_defaults, **(train_transform or {})})
        except TypeError as error:
            raise ValueError(f"train_transform is {train_transform}: {error}") from error

    @property
    def label_code(self) -> LabelCode:
        """What the numbers in a mask mean."""
        return LabelCode(self.num_classes, 0, IGNORED)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def check(self, images: Scenes, split: str) -> None:
        """Looks at a few images of the split, so that a mistake in all of them ends a run before it begins."""
        step = max(1, len(images) // _CHECKED)
        self._transformed(images, split == "train").__getitems__(range(0, len(images), step)[:_CHECKED])

    def dataset(self, split: str, training: bool, multiple_of: int) -> SceneDataset:
        return self._transformed(self.images(split), training, multiple_of)

    def _transformed(self, scenes: Scenes, training: bool, multiple_of: int = 1) -> SceneDataset:
        transform = self._train_transform if training else unchanged
        return SceneDataset(scenes, self.label_code, transform, is_random=training, multiple_of=multiple_of)

    def collate(self, training: bool) -> Callable[[Any], tuple[Tensor, Tensor]]:
        return partial(collate_scenes, size=self.crop_size)

    def loader_batch_size(self, training: bool) -> int:
        return self.batch_size if training or self.eval_batch_size is None else self.eval_batch_size

    def unlabeled(self, images: Images, multiple_of: int) -> tuple[ImageDataset, Callable[[Any], Any], int]:
        """Batches are one image `[1, 3, H, W]` each, in its own size."""
        dataset = ImageDataset(images, pil_to_tensor, 3, is_random=False, multiple_of=multiple_of)
        return dataset, partial(_images_alone, size=self.crop_size), 1

    def draw(self, loader: DataLoader, num_images: int, path: Path) -> Path:
        painted: list[Tensor] = []
        for images, masks in loader:
            painted += [paint(image, mask, self.num_classes) for image, mask in zip(images, masks, strict=True)]
            if len(painted) >= num_images:
                break
        return draw_batch(painted[:num_images], [""] * num_images, path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(crops of {self.crop_size}, {self.num_classes} classes, {self._counts()})"

    __str__ = __repr__


def _images_alone(items: Sequence[tuple[Tensor, int] | None], *, size: int) -> tuple[Tensor]:
    return (collate_images(items, shape=(3, size, size))[0],)
