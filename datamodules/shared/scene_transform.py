"""What training does to an image and its mask together: scale, crop, flip, photometric distortion."""

import math
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from .base import check_at_least
from .scenes import IGNORED

_TRIES = 10
_FILL = (124, 116, 104)  # the mean of ImageNet, which normalizes to about 0
# SSD's distortion, as mmsegmentation has it: 32 / 255 in brightness, 18 / 360 in hue.
_PHOTOMETRIC = ({"brightness": 32 / 255}, {"contrast": 0.5}, {"saturation": 0.5}, {"hue": 0.05})


class RandomScale(v2.Transform):
    """Scales an image and its mask by one factor, drawn evenly; masks by the nearest pixel.

    Args:
        low, high: limits of the factor.
        short_side: pixels of the shorter side that factor 1 gives; None for the image's own.
    """

    def __init__(self, low: float, high: float, short_side: int | None) -> None:
        super().__init__()
        self.low, self.high, self.short_side = low, high, short_side

    def size(self, height: int, width: int, factor: float) -> list[int]:
        """Height and width after scaling by `factor`."""
        ratio = factor * (1.0 if self.short_side is None else self.short_side / min(height, width))
        return [max(1, round(height * ratio)), max(1, round(width * ratio))]

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = functional.get_size(flat_inputs[0])
        factor = self.low + (self.high - self.low) * torch.rand(()).item()
        return {"size": self.size(height, width, factor)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if isinstance(inpt, tv_tensors.Mask):
            # torchvision's own resize of masks (NEAREST) is half a pixel off the image's.
            resized = functional.resize_image(
                inpt.as_subclass(Tensor)[None], params["size"], InterpolationMode.NEAREST_EXACT
            )
            return tv_tensors.wrap(resized[0], like=inpt)
        return functional.resize(inpt, params["size"], InterpolationMode.BILINEAR, antialias=True)


class LimitedCrop(v2.Transform):
    """A random square in which no class has more than a share of the pixels, as far as ten tries find one.

    Where a side of the image is shorter than the square, it is filled up at the right and below: the image with
    gray, the mask with 255. As mmsegmentation's `RandomCrop(cat_max_ratio=...)`.

    Args:
        size: pixels a side.
        max_class_share: the share; 1 for any crop.
    """

    def __init__(self, size: int, max_class_share: float) -> None:
        super().__init__()
        self.size, self.max_class_share = size, max_class_share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = functional.get_size(flat_inputs[0])
        mask = next(inpt for inpt in flat_inputs if isinstance(inpt, tv_tensors.Mask)).as_subclass(Tensor)
        rows, columns = min(self.size, height), min(self.size, width)
        top = left = 0
        for _ in range(_TRIES):
            top = int(torch.randint(height - rows + 1, ()))
            left = int(torch.randint(width - columns + 1, ()))
            if self.max_class_share >= 1:
                break
            part = mask[top : top + rows, left : left + columns]
            counts = torch.bincount(part[part != IGNORED].long())
            if (counts > 0).sum() > 1 and counts.max() < self.max_class_share * counts.sum():
                break
        return {"top": top, "left": left, "height": rows, "width": columns}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        cut = functional.crop(inpt, **params)
        padding = [0, 0, self.size - params["width"], self.size - params["height"]]
        if not any(padding):
            return cut
        return functional.pad(cut, padding, fill=IGNORED if isinstance(inpt, tv_tensors.Mask) else list(_FILL))


class TrainTransform:
    """Scale, crop, flip and photometric distortion of an image and its mask; it draws from torch's global state.

    Args:
        crop_size: H = W of the result.
        scale: limits of the scale.
        short_side: pixels of the shorter side that scale 1 gives; None for the image's own.
        max_class_share: of the pixels that count in a crop, what no class may exceed (in ten tries).
        flip: probability of a mirror image.
        photometric: probability of each of a change in brightness, contrast, saturation and hue.

    Raises:
        ValueError: a number is out of its limits.
    """

    def __init__(
        self,
        crop_size: int,
        scale: tuple[float, float] = (0.5, 2.0),
        short_side: int | None = None,
        max_class_share: float = 0.75,
        flip: float = 0.5,
        photometric: float = 0.5,
    ) -> None:
        self.crop_size = check_at_least("crop_size", crop_size, 1)
        if short_side is not None:
            check_at_least("short_side", short_side, 1)
        is_pair = isinstance(scale, (list, tuple)) and len(scale) == 2 and all(map(_is_number, scale))
        if not is_pair or not 0 < scale[0] <= scale[1]:
            raise ValueError(f"scale is {scale!r}: give its lower and upper limit, above 0")
        if not _is_number(max_class_share) or not 0 < max_class_share <= 1:
            raise ValueError(f"max_class_share is {max_class_share!r}: give a number above 0 and at most 1")
        for name, value in (("flip", flip), ("photometric", photometric)):
            if not _is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}: give a probability in [0, 1]")
        self._scale = RandomScale(*scale, short_side)
        colors = [v2.RandomApply([v2.ColorJitter(**change)], p=photometric) for change in _PHOTOMETRIC]
        # What cannot change anything is left out: for small images it would cost more than the rest.
        scales = [self._scale] if tuple(scale) != (1, 1) or short_side is not None else []
        mirror = [v2.RandomHorizontalFlip(flip)] if flip > 0 else []
        crop = LimitedCrop(crop_size, max_class_share)
        self._transform = v2.Compose([*scales, crop, *mirror, *(colors if photometric > 0 else [])])

    def __call__(self, image: Tensor, mask: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Image `[3, H, W]` and mask `[H, W]`, uint8, of `crop_size`.

        Raises:
            ValueError: no scale makes the image as high and wide as the crop.
        """
        height, width = image.shape[-2:]
        largest = self._scale.size(height, width, self._scale.high)
        if min(largest) < self.crop_size:
            raise ValueError(
                f"crop_size={self.crop_size} is larger than {name}, which has {height} x {width} pixels and at most "
                f"{largest[0]} x {largest[1]} after scaling: give a smaller crop_size, or "
                f"train_transform={{'short_side': {self.crop_size}}}"
            )
        return self._transform(image, mask)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
