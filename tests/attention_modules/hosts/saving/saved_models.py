"""Tiny Hugging Face models that are swapped and saved, for the tests of their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention_modules.hosts.base import PLAN

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=20))


MODELS = {"vit": vit, "gpt2": gpt2, "bert": bert}


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[family]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def output(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if "ViT" in type(model).__name__:
            return model(torch.randn(2, 3, 8, 8, generator=generator))[0]
        return model(torch.randint(0, 20, (2, 5), generator=generator), use_cache=False)[0]


def output_of_ids(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(10).view(2, 5))[0]


def recorded(folder: Path) -> list[dict[str, object]]:
    """What the plan says of each layer."""
    return json.loads((folder / PLAN).read_text("utf-8"))["layers"]


def saved(model: nn.Module, folder: Path) -> Path:
    with pytest.warns(UserWarning, match=f"swapped attention layers, which are listed in {PLAN}.*load_pretrained"):
        model.save_pretrained(folder)
    return folder
