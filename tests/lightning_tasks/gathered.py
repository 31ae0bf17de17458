"""What the scripts beside the pages make of a comparison's cells, checked against what the cells hold."""

from __future__ import annotations

import csv
import runpy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_tasks.compare.images import FILE, PIXELS, read_images

PAGES = Path(__file__).resolve().parents[2] / "docs" / "results"
Values = Mapping[tuple[str, int, str], float]
"""By configuration, seed and metric."""


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def check_gathered(output: Path, folder: Path, values: Values) -> None:
    """Classes, first images and masks of camvid/compare_segmenter, which three images test."""
    script = runpy.run_path(str(PAGES / "rpc_segmentation" / "gather.py"))
    with pytest.raises(SystemExit, match="has no cells: give the folder"):
        script["main"](folder, folder)
    script["main"](output, folder, shown=(0, 2))
    miou = {config: value for (config, _, metric), value in values.items() if metric == "test/miou"}
    rows, first = read(folder / "classes.csv"), read(folder / "first_images.csv")
    for config, value in miou.items():
        iou = [float(row["iou"]) for row in rows if row["config"] == config]
        assert np.nanmean(iou) == pytest.approx(value, abs=1e-5)
    assert {row["config"]: float(row["miou"]) for row in first} == pytest.approx(miou, abs=1e-6)
    kept, whole = np.load(folder / "masks.npz"), script["masks"](output / "cells", 0, (0, 2))
    assert set(kept.files) == {"image", "truth", *miou}
    assert all((kept[name] == whole[name][..., ::2, ::2]).all() for name in kept.files)
    for place, config in script["CONFIGS"].items():
        counts = read_images(output / "cells" / place / "seed_0" / FILE, output)[PIXELS][[0, 2]]
        classes = counts.shape[-1]
        for mask, truth, (found, there, predicted) in zip(whole[config], whole["truth"], counts, strict=True):
            known = truth < classes  # the others have no label
            assert (np.bincount(truth[known], minlength=classes) == there).all()
            assert (np.bincount(mask[known], minlength=classes) == predicted).all()
            assert (np.bincount(mask[mask == truth], minlength=classes) == found).all()


def check_learned(output: Path, folder: Path, values: Values) -> None:
    """What rpc/compare_scaled has learned: the scalars, norms of the matrices and what their largest values hold."""
    script = runpy.run_path(str(PAGES / "scaled_attention" / "learned.py"))
    with pytest.raises(SystemExit, match="has no checkpoints: give the folder"):
        script["main"](folder, folder)
    script["main"](output, folder)
    matrices: list[torch.Tensor] = []
    scalars: list[torch.Tensor] = []
    for place, learned in (("scaled_by_a_matrix", matrices), ("scaled_by_a_scalar", scalars)):
        checkpoint = torch.load(output / "cells" / place / "seed_0" / "last.ckpt", weights_only=True)
        learned += [each.double() for name, each in checkpoint["state_dict"].items() if name.endswith("mechanism.s")]
    rows = read(folder / "learned.csv")
    assert [(row["seed"], row["layer"]) for row in rows] == [("0", str(layer)) for layer in range(len(matrices))]
    for row, matrix, scalar in zip(rows, matrices, scalars, strict=True):
        squares = torch.linalg.eigvalsh(matrix @ matrix.mT)  # [H, N], the smallest first
        whole = matrix.square().sum((1, 2))
        assert float(row["scalar"]) == pytest.approx(scalar.item(), rel=1e-4)
        assert float(row["norm"]) == pytest.approx(whole.sqrt().mean().item(), rel=1e-4)
        assert float(row["largest"]) == pytest.approx((squares[:, -8:].sum(1) / whole).mean().item(), rel=1e-4)


CHECKS = {"camvid/compare_segmenter": check_gathered, "rpc/compare_scaled": check_learned}
