"""Tiny images with masks in the layouts of CamVid and ADE20K, for tests."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests.datamodules.image_files import random_pixels


def write_pair(image: Path, mask: Path, labels: np.ndarray, seed: int = 0) -> None:
    """An image of random pixels, of the size of its labels `[H, W]`, and the labels."""
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    height, width = labels.shape
    pixels = random_pixels(1, max(height, width), seed)[0][:height, :width]
    Image.fromarray(np.ascontiguousarray(pixels)).save(image)
    Image.fromarray(labels.astype(np.uint8)).save(mask)


def write_camvid(root: Path, count: int = 3, size: tuple[int, int] = (36, 48)) -> Path:
    """`root/camvid` with `count` pairs a split, labels 0 to 11; returns the folder."""
    generator = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for index in range(count):
            labels = generator.integers(0, 12, size).repeat(1, 0)
            name = f"{split}_{index}"
            write_pair(
                root / "camvid" / split / f"{name}.jpg", root / "camvid" / f"{split}annot" / f"{name}.png", labels
            )
    return root / "camvid"


def write_ade20k(root: Path, sizes: tuple[tuple[int, int], ...] = ((40, 52), (48, 40))) -> Path:
    """`root/ADEChallengeData2016` with a pair of each size a split, labels 0 to 150; returns the folder."""
    generator = np.random.default_rng(0)
    folder = root / "ADEChallengeData2016"
    for split in ("training", "validation"):
        for index, size in enumerate(sizes):
            name = f"ADE_{split}_{index}"
            write_pair(
                folder / "images" / split / f"{name}.jpg",
                folder / "annotations" / split / f"{name}.png",
                generator.integers(0, 151, size),
            )
    return folder
