"""What the scripts beside the pages make of a comparison's cells, checked against what its cells logged."""

from __future__ import annotations

import csv
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

PAGES = Path(__file__).resolve().parents[2] / "docs" / "results"
Values = Mapping[tuple[str, int, str], float]
"""By configuration, seed and metric."""


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def check_gathered(output: Path, values: Values) -> None:
    """Classes, first images and masks of camvid/compare_segmenter."""
    script, folder = PAGES / "rpc_segmentation" / "gather.py", output.parent / "gathered"
    folder.mkdir()
    main = runpy.run_path(str(script))["main"]
    with pytest.raises(SystemExit, match="has no cells: give the folder"):
        main(folder, folder)
    main(output, folder, shown=(0, 2))
    rows, first = read(folder / "classes.csv"), read(folder / "first_images.csv")
    configs = {config for config, _, _ in values}
    for config in configs:
        iou = [float(row["iou"]) for row in rows if row["config"] == config]
        assert np.nanmean(iou) == pytest.approx(values[config, 0, "test/miou"], abs=1e-5)
    assert {row["config"]: float(row["miou"]) for row in first} == pytest.approx(
        {config: values[config, 0, "test/miou"] for config in configs}, abs=1e-6
    ), "all three images are among the first"
    masks = np.load(folder / "masks.npz")
    assert set(masks.files) == {"image", "truth", *configs}
    assert {masks[config].shape for config in configs} == {masks["truth"].shape}
    assert len(masks["truth"]) == 2


def check_learned(output: Path, values: Values) -> None:
    """Scalars and singular values of rpc/compare_scaled."""
    script, folder = PAGES / "scaled_attention" / "learned.py", output.parent / "learned"
    folder.mkdir()
    given = sys.argv
    try:
        sys.argv = [str(script), str(folder), str(folder)]
        with pytest.raises(SystemExit, match="has no checkpoints: give the folder"):
            runpy.run_path(str(script))
        sys.argv = [str(script), str(output), str(folder)]
        runpy.run_path(str(script))
    finally:
        sys.argv = given
    cells = output / "cells"
    weights = torch.load(cells / "scaled_by_a_matrix" / "seed_0" / "last.ckpt", weights_only=True)["state_dict"]
    matrices = [weight for name, weight in weights.items() if name.endswith("mechanism.s")]
    rows = read(folder / "learned.csv")
    assert [row["layer"] for row in rows] == [str(layer) for layer in range(len(matrices))]
    for row, matrix in zip(rows, matrices, strict=True):
        norms = torch.linalg.matrix_norm(matrix.double())
        assert float(row["norm"]) == pytest.approx(norms.mean().item(), rel=1e-4)
        assert 0 < float(row["largest"]) <= 1


CHECKS = {"camvid/compare_segmenter": check_gathered, "rpc/compare_scaled": check_learned}
