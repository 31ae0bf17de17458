"""What S has learned in each layer of the cells of rpc/compare_scaled, as CSV: python learned.py OUTPUT_OF_COMPARE."""

import sys
from pathlib import Path

import torch

cells = Path(sys.argv[1]) / "cells"
seeds = sorted(int(path.parent.name.removeprefix("seed_")) for path in cells.glob("scaled_by_a_scalar/*/last.ckpt"))
print("seed,layer,scalar,norm,largest")
for seed in seeds:
    matrices, scalars = (
        torch.load(cells / f"scaled_by_a_{variant}" / f"seed_{seed}" / "last.ckpt", weights_only=True)["state_dict"]
        for variant in ("matrix", "scalar")
    )
    for layer, name in enumerate(sorted(key for key in matrices if key.endswith("mechanism.s"))):
        power = torch.linalg.svdvals(matrices[name].double()) ** 2  # [H, N], the largest first
        norm, largest = power.sum(1).sqrt().mean(), (power[:, :8].sum(1) / power.sum(1)).mean()
        print(seed, layer, *(f"{each.item():.6g}" for each in (scalars[name], norm, largest)), sep=",")
