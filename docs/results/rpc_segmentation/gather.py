"""What the cells of camvid/compare_segmenter predict: python gather.py OUTPUT_OF_COMPARE FOLDER.

IoU per class, of what each cell kept of its test, goes to classes.csv, and the mIoU of the images that are attacked to
first_images.csv. The masks of two test images that the models of the first seed predict go to masks.npz, of their last
checkpoints; the images are read from $ATTNSWAP_DATA.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from attnswap.datamodules import CamVidDataModule

from lightning_tasks import SegmentationTask
from lightning_tasks.compare.images import FILE, PIXELS, read_images
from lightning_tasks.training.segmentation_metrics import scores_of_counts

CONFIGS = {"softmax": "softmax", "symmetric": "symmetric", "rpc": "rpc", "rpc_without_S": "rpc without S"}
ATTACKED = 64  # the first test images
SHOWN = (0, 116)  # the first test image and the middle one, which is of another street


def main(output: Path, folder: Path, shown: Sequence[int] = SHOWN) -> None:
    """Write the files of a comparison's output; nothing before all of it is there."""
    cells = output / "cells"
    seeds = sorted(int(path.name.removeprefix("seed_")) for path in (cells / "softmax").glob("seed_*"))
    if not seeds:
        sys.exit(f"{cells} has no cells: give the folder that attnswap compare camvid/compare_segmenter wrote")
    classes, first = scores(cells, seeds)
    tables = {
        "classes.csv": [["config", "seed", "name", "pixels", "iou", "accuracy"], *classes],
        "first_images.csv": [["config", "seed", "miou"], *first],
    }
    predicted = masks(cells, seeds[0], shown)
    for name, table in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
    np.savez_compressed(folder / "masks.npz", **{name: each[..., ::2, ::2] for name, each in predicted.items()})


def scores(cells: Path, seeds: Sequence[int]) -> tuple[list[list[object]], list[list[object]]]:
    """Rows of each class, and of the mIoU of the images that are attacked."""
    classes: list[list[object]] = []
    first: list[list[object]] = []
    for place, config in CONFIGS.items():
        for seed in seeds:
            kept = read_images(cells / place / f"seed_{seed}" / FILE, cells)
            if PIXELS not in kept:
                sys.exit(f"{cells / place} has no {FILE} of seed {seed}: finish the comparison by its own command")
            miou = scores_of_counts(torch.from_numpy(kept[PIXELS][:ATTACKED].astype(np.int64)).sum(0))[0].item()
            first.append([config, seed, f"{miou:.8f}"])
            found, there, predicted = kept[PIXELS].astype(np.int64).sum(0)
            iou = found / (there + predicted - found)
            columns = zip(CamVidDataModule.class_names, there, iou, found / there, strict=True)
            classes += [
                [config, seed, name, count, f"{one:.6f}", f"{other:.6f}"] for name, count, one, other in columns
            ]
    return classes, first


def masks(cells: Path, seed: int, shown: Sequence[int]) -> dict[str, np.ndarray]:
    """Test images, their true masks, and those that the last checkpoint of each configuration predicts."""
    data = CamVidDataModule(num_workers=0)
    data.setup("test")
    loader = data.test_dataloader()
    images, truth = loader.collate_fn([loader.dataset[index] for index in shown])  # images in [0, 1]
    found = {"image": (images * 255).round().byte().numpy(), "truth": truth.byte().numpy()}
    for place, config in CONFIGS.items():
        task = SegmentationTask.load_from_checkpoint(cells / place / f"seed_{seed}" / "last.ckpt").eval()
        with torch.no_grad():
            found[config] = task.predict_step((images, truth), 0).byte().numpy()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
