"""What the cache of a tiny Llama holds after so many tokens: `python -m benchmarks.generating.cache_bytes`.

Gives each model 32,768 tokens in parts, as `generate(..., prefill_chunk_size=...)` does, with one cache, and counts the
bytes of its tensors' storages on the way. Writes `benchmarks/results/cache_bytes.csv` and the table of
`docs/how_to/generating.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_modules import swap_attention

LENGTHS = (512, 2_048, 8_192, 32_768)
PART = 512
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "window, window=512": ("window", {}),
    "hedgehog": ("hedgehog", {}),
    "hedgehog, window=64": ("hedgehog", {"window": 64}),
    "gated_delta": ("gated_delta", {}),
    "gated_delta in three layers of four": ("gated_delta", {"layers": [0, 1, 2]}),
}
RESULTS = Path(__file__).parents[1] / "results" / "cache_bytes.csv"
PAGE = Path(__file__).parents[2] / "docs/how_to/generating.md"
START, END = "<!-- cache bytes -->\n", "<!-- end of cache bytes -->"


def model_of(mechanism: str, options: Mapping[str, Any]) -> nn.Module:
    """A random Llama of four layers with four heads of width 64, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, head_dim=64, vocab_size=64, max_position_embeddings=LENGTHS[-1])
    model = LlamaForCausalLM(config).eval()
    swap_attention(model, mechanism, **options)
    return model


def bytes_of(cache: Any) -> int:
    """What the tensors of a cache hold, views counted as all that they keep in memory."""
    held: dict[int, int] = {}
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        for part in (layer.keys, layer.values) if state is None else state.values():
            storage = part.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


@torch.no_grad()
def measured(mechanism: str, options: Mapping[str, Any], lengths: tuple[int, ...] = LENGTHS) -> dict[int, int]:
    """Bytes of the cache by the number of tokens."""
    from transformers import DynamicCache

    model, cache, found = model_of(mechanism, options), DynamicCache(), {}
    tokens = torch.randint(0, 64, (1, lengths[-1]), generator=torch.Generator().manual_seed(1))
    for part in tokens.split(PART, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
        if cache.get_seq_length() in lengths:
            found[cache.get_seq_length()] = bytes_of(cache)
    return found


def table(rows: Mapping[str, Mapping[int, int]]) -> str:
    """Mebibytes of each model's cache, as a table of Markdown."""
    lengths = list(next(iter(rows.values())))
    lines = [f"| mechanism | {' | '.join(f'{length:,} tokens' for length in lengths)} |"]
    lines.append(f"|---|{'---|' * len(lengths)}")
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{row[length] / 2**20:.2f}' for length in lengths)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write both files."""
    rows: dict[str, dict[int, int]] = {}
    for name, given in MODELS.items():
        rows[name] = measured(*given)
        print(name, rows[name], flush=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mechanism", *LENGTHS])
        writer.writerows([name, *row.values()] for name, row in rows.items())
    text = PAGE.read_text("utf-8")
    head, rest = text.split(START)
    PAGE.write_text(f"{head}{START}{table(rows)}\n{END}{rest.split(END, 1)[1]}", "utf-8")


if __name__ == "__main__":
    main()
