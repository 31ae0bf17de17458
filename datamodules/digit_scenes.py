"""Handwritten digits on textured canvases, with exact masks: on every machine, without a download."""

from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from .digits import DigitsDataModule
from .segmentation import SegmentationDataModule
from .shared.base import check_at_least
from .shared.scenes import Scenes

_SMALLEST = 32
_KEPT = 32  # pixels a side up to which cut-outs are kept
_CELLS, _EMPTY = 2, 0.25  # cells per side, with a digit each or none
_PLACES = {"train": 0, "validation": 1, "test": 2}


class DigitScenes(Scenes):
    """Scenes that are drawn when they are read; scene i follows from the seed, the split and i alone.

    Args:
        digits: strokes, `[digits, 8, 8]` uint8.
        labels: the digit of each.
        size: H = W of a scene.
        count: number of scenes.
        seed: numbers, which make up the seed.
    """

    def __init__(self, digits: np.ndarray, labels: np.ndarray, size: int, count: int, seed: tuple[int, ...]) -> None:
        self.digits, self.labels, self.size, self.count, self.seed = digits, labels, size, count, seed

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        generator = np.random.default_rng([*self.seed, index])
        canvas = texture(self.size, generator)
        mask = np.zeros((self.size, self.size), dtype=np.uint8)
        cell = self.size // _CELLS
        for place in range(_CELLS**2):
            if generator.random() < _EMPTY:
                continue
            which = generator.integers(len(self.labels))
            side = int(generator.integers(round(0.85 * cell), cell + 1))
            top, left = generator.integers(0, cell - side + 1, 2) + np.array(divmod(place, _CELLS)) * cell
            area = slice(top, top + side), slice(left, left + side)
            stroke, sticker = (kept_cut_out if side <= _KEPT else cut_out)(self.digits[which].tobytes(), side)
            paper, ink = generator.uniform(0.8, 1.0, 3), generator.uniform(0.0, 0.2, 3)
            canvas[area] = np.where(sticker[..., None], paper, canvas[area])
            canvas[area] = np.where(stroke[..., None], ink, canvas[area])
            mask[area] = np.where(sticker, self.labels[which] + 1, mask[area])
        canvas += generator.normal(0, 0.04, canvas.shape)
        image = np.rint(255 * canvas.clip(0, 1)).astype(np.uint8)
        return Image.fromarray(image), Image.fromarray(mask)

    def name(self, index: int) -> str:
        return f"scene {index}"


def cut_out(digit: bytes, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a digit's stroke is drawn, and the paper that it is cut out on: booleans `[side, side]`.

    Args:
        digit: its 8 x 8 gray values, row by row.
        side: pixels.
    """
    margin = max(1, side // 10)
    inner = side - 2 * margin
    glyph = Image.new("L", (side, side))
    glyph.paste(Image.frombytes("L", (8, 8), digit).resize((inner, inner), Image.Resampling.BICUBIC), (margin, margin))
    return _is_ink(glyph), _is_ink(glyph.filter(ImageFilter.MaxFilter(2 * margin + 1)))


kept_cut_out = lru_cache(maxsize=4096)(cut_out)  # a third of the time of a small scene; at 16 pixels a side 2 MiB


def _is_ink(glyph: Image.Image) -> np.ndarray:
    return np.asarray(glyph) > 128


def texture(size: int, generator: np.random.Generator) -> np.ndarray:
    """A canvas `[size, size, 3]` of waves around a color, neither as dark as ink nor as bright as paper."""
    rows, columns = np.arange(size)[:, None] / size, np.arange(size) / size
    color = generator.uniform(0.3, 0.7, 3)
    angle, waves, phase = generator.uniform(0, np.pi), generator.uniform(2, 8), generator.uniform(0, 2 * np.pi)
    wave = np.sin(2 * np.pi * waves * (rows * np.sin(angle) + columns * np.cos(angle)) + phase)
    return color + 0.08 * wave[..., None]


class DigitScenesDataModule(SegmentationDataModule):
    """Scenes of up to four of scikit-learn's handwritten digits, in eleven classes: background and the ten digits.

    The digits of training, validation and test are other ones, split as by
    :class:`.DigitsDataModule`. A digit is a sticker: its stroke and a margin of paper, whose pixels
    are its mask, exactly.

    Args:
        batch_size, num_workers, eval_batch_size: see :class:`.SegmentationDataModule`.
        img_size: H = W of a scene in pixels, at least 32.
        crop_size: H = W of training images; `img_size` where None.
        num_train, num_val, num_test: number of scenes.
        scene_seed: draws the scenes; not the seed of the run, so that runs have the same scenes.
        train_transform: see :class:`.SegmentationDataModule`. Where it does not say so there
            is no scaling, no limit of a class's share of a crop, and no mirror image, for a mirrored digit is none.

    Raises:
        ValueError: as :class:`.SegmentationDataModule`.

    Example:
        >>> from attnswap.datamodules import DigitScenesDataModule
        >>> data = DigitScenesDataModule(batch_size=2, num_train=4, num_val=2, num_test=2)
        >>> data.setup("fit")
        >>> image, mask = next(iter(data.train_dataloader()))
        >>> image.shape, mask.shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2, 32, 32]))
    """

    class_names = ("background", *"0123456789")
    transform_defaults = MappingProxyType({"scale": (1.0, 1.0), "max_class_share": 1.0, "flip": 0.0})

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        img_size: int = 32,
        crop_size: int | None = None,
        eval_batch_size: int | None = None,
        num_train: int = 2000,
        num_val: int = 200,
        num_test: int = 200,
        scene_seed: int = 0,
        train_transform: dict[str, Any] | None = None,
    ) -> None:
        self.img_size = check_at_least("img_size", img_size, _SMALLEST)
        crop_size = img_size if crop_size is None else crop_size
        super().__init__(batch_size, num_workers, crop_size, eval_batch_size, train_transform)
        counts = {"num_train": num_train, "num_val": num_val, "num_test": num_test}
        for name, count in counts.items():
            check_at_least(name, count, 1)
        self.scene_seed = check_at_least("scene_seed", scene_seed, 0)
        self._sizes = dict(zip(_PLACES, counts.values(), strict=True))

    def load(self, split: str) -> DigitScenes:
        digits = DigitsDataModule().load(split)
        seed = (self.scene_seed, _PLACES[split])
        return DigitScenes(digits.pixels, digits.labels, self.img_size, self._sizes[split], seed)
