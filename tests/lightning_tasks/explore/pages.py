"""Small models, and what a page of theirs holds."""

import base64
import json
import re
import zlib

import numpy as np
import torch
from torch import nn

SIZE = 32  # pixels of a side


def vit(**options):
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **{**sizes, **options}).eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)  # maps that are not nearly uniform
    return model


class Translator(nn.Module):
    """An encoder and a decoder of one layer each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.whole = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, source, target, source_padding):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
        return self.whole(source, target, tgt_mask=mask, **padding)


def data_of(html):
    """The plain data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def maps_of(html, model, sample):
    """The maps of a model and a sample as the page has them, ``[H, R, M]`` each, the rollout last."""
    found = data_of(html)["models"][model]
    text = re.search(rf'id="maps-{model}-{sample}">(.*?)</script>', html)[1]
    content = zlib.decompress(base64.b64decode(text))
    layers = [*found["layers"]]
    if found["rollout"]:
        alone = next(layer for layer in layers if not layer["cross"])
        layers.append({**alone, "heads": 1})
    shapes = [(each["heads"], len(each["rows"] or range(each["queries"])), each["keys"]) for each in layers]
    start, parts = 0, []
    for size in (lambda h, r, m: 8 * h, lambda h, r, m: h * r, lambda h, r, m: h * m, lambda h, r, m: h * r * m):
        parts.append([])
        for shape in shapes:
            parts[-1].append(np.frombuffer(content[start : start + size(*shape)], np.uint8))
            start += size(*shape)
    assert start == len(content)
    maps = []
    for (heads, rows, keys), ends, halved, median, codes in zip(shapes, *parts, strict=True):
        low, width = ends.view("<f4").reshape(heads, 2, 1, 1).swapaxes(0, 1)
        steps = codes.reshape(heads, rows, keys) + median.reshape(heads, 1, keys)
        times = halved.reshape(heads, rows, 1).astype(float)
        maps.append(torch.tensor(low + np.where(times == 255, np.nan, width / 128 / 2**times) * steps).float())
    return maps
