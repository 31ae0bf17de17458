"""How fast a small Llama writes after 4,096 tokens, and what its cache holds then, by mechanism and share of layers.

`python -m benchmarks.generating.speed OUTPUT.csv`. The sizes are those of `examples/linearize/teacher.yaml`, with
random weights. Each model is given 4,096 tokens; then one token after the other is decoded, the models taking turns.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_modules import swap_attention
from benchmarks.generating.cache_bytes import bytes_of

LENGTH, DECODED, ROUNDS = 4096, 32, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "hedgehog": {"window": 16},
    "gla": {},
    "gated_delta": {},
    "window": {"window": 16, "sinks": 4},
}


def model_of(mechanism: str, layers: list[int] | None) -> nn.Module:
    """A random Llama of four layers with two heads of width 64, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4096, max_position_embeddings=65536)).eval()
    if mechanism != "softmax":
        swap_attention(model, mechanism, layers=layers, **OPTIONS[mechanism])
    return model


@torch.inference_mode()
def main(output: str) -> None:
    """Measure, and write a row for each model."""
    from transformers import DynamicCache

    torch.set_num_threads(1)
    cases = [("softmax", "none", None)]
    cases += [(name, share, layers) for name in OPTIONS for share, layers in (("all", None), ("3 of 4", [0, 1, 2]))]
    tokens = torch.randint(0, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    running, rows = {}, []
    for name, share, layers in cases:
        model, cache = model_of(name, layers), DynamicCache()
        start = time.perf_counter()
        model(tokens, past_key_values=cache, logits_to_keep=1)
        running[name, share] = model, cache, time.perf_counter() - start, bytes_of(cache)
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in running}
    for _ in range(ROUNDS):
        for case, (model, cache, *_) in running.items():
            start = time.perf_counter()
            for index in range(DECODED):
                model(tokens[:, index : index + 1], past_key_values=cache, logits_to_keep=1)
            seconds[case].append((time.perf_counter() - start) / DECODED)
    for (name, share), (_, _, prefill, held) in running.items():
        speed = 1 / statistics.median(seconds[name, share])
        rows.append([name, share, f"{LENGTH / prefill:.0f}", f"{speed:.1f}", held])
    with Path(output).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["mechanism", "layers", "prefill_per_second", "tokens_per_second", "cache_bytes"], *rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
