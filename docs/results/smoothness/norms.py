"""The norms of values' weights in the random models of the smoothness page, as CSV: python norms.py FOLDER."""

import csv
import sys
from pathlib import Path

import torch

from lightning_tasks.analyses.subjects import load_subject

LAYERS = (0, 5, 11)

bert, gpt2 = (dict(load_subject(name, random=True).model.named_modules()) for name in ("bert", "gpt2"))
with (Path(sys.argv[1]) / "norms.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["model", "layer", "norm"])
    for layer in LAYERS:
        w_v = bert[f"encoder.layer.{layer}.attention.self"].value.weight
        table.writerow(["bert", layer, f"{torch.linalg.matrix_norm(w_v, 2).item():.6g}"])
    for layer in LAYERS:
        attention = gpt2[f"h.{layer}.attn"]  # whose weights are of inputs by outputs: queries, keys, values
        w_v = attention.c_attn.weight.chunk(3, dim=1)[2]
        norm = torch.linalg.matrix_norm(w_v @ attention.c_proj.weight, 2)
        table.writerow(["gpt2", layer, f"{norm.item():.6g}"])
