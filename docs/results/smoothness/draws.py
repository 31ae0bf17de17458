"""How far the ascent of the smoothness page can be repeated, and the bounds, as CSV: python draws.py MINILM FOLDER."""

import csv
import sys
from pathlib import Path

import torch

from attention_modules.analysis import ascend_lipschitz, layer_lipschitz_bound, local_lipschitz
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.inputs import apart, token_stream
from lightning_tasks.analyses.subjects import choose_layers, layer_calls, load_subject

LENGTHS = (4, 8, 16, 32, 64, 100)
RADII = {0: 12.0, 2: 12.4, 5: 14.0}  # by layer: R at 100 tokens, mean over sequences

name, folder = sys.argv[1], Path(sys.argv[2])
subject = load_subject(name)
hosts = list(attention_layers(subject.model))
layers = dict(zip(RADII, choose_layers(subject.model, ",".join(map(str, RADII))), strict=True))
with (folder / "bounds.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["layer", "radius", "bound"])
    for index, radius in RADII.items():
        bound = layer_lipschitz_bound(hosts[index], radius=radius, num_tokens=LENGTHS[-1])
        table.writerow([index, radius, f"{bound.item():.6g}"])
text = apart(token_stream("gutenberg", name, subject.model), 10, LENGTHS[-1], "gutenberg")
with (folder / "draws.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["layer", "draw", "length", "mean"])
    for index, layer in layers.items():
        for draw in range(4):  # the text itself, then three times with every number changed by some 1e-7 of it
            generator = torch.Generator().manual_seed(draw)
            for length in LENGTHS:
                (call,) = layer_calls(subject, text[:, :length], [layer], length)
                noise = 1e-7 * min(draw, 1) * torch.randn(call.x.shape, generator=generator)
                found = ascend_lipschitz(call, call.x * (1 + noise), steps=100)
                mean = local_lipschitz(call, found).value.mean().item()
                table.writerow([index, draw, length, f"{mean:.6g}"])
                file.flush()
