"""What S has learned in each layer of the cells of rpc/compare_scaled: python learned.py OUTPUT_OF_COMPARE FOLDER."""

import csv
import sys
from pathlib import Path

import torch


def main(output: Path, folder: Path) -> None:
    """Write the table of a comparison's output; nothing before all of it is there."""
    cells = output / "cells"
    rows: list[list[object]] = []
    for seed in sorted(
        int(path.parent.name.removeprefix("seed_")) for path in cells.glob("scaled_by_a_scalar/*/last.ckpt")
    ):
        paths = [cells / f"scaled_by_a_{variant}" / f"seed_{seed}" / "last.ckpt" for variant in ("matrix", "scalar")]
        if absent := [path for path in paths if not path.is_file()]:
            sys.exit(f"{absent[0]} is missing: finish the comparison by its own command")
        matrices, scalars = (torch.load(path, weights_only=True)["state_dict"] for path in paths)
        names = [key for key in matrices if key.endswith("mechanism.s")]  # in the order of the model
        for layer, name in enumerate(names):
            power = torch.linalg.svdvals(matrices[name].double()) ** 2  # [H, N], the largest first
            norm, largest = power.sum(1).sqrt().mean(), (power[:, :8].sum(1) / power.sum(1)).mean()
            rows.append([seed, layer, *(f"{each.item():.6g}" for each in (scalars[name], norm, largest))])
    if not rows:
        sys.exit(f"{cells} has no checkpoints: give the folder that attnswap compare rpc/compare_scaled wrote")
    with (folder / "learned.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["seed", "layer", "scalar", "norm", "largest"], *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
