"""Greedy generation of every mechanism with each kind of key-value cache, and without one.

``python -m tests.attention_modules.hosts.huggingface.generating`` writes the table of docs/how_to/generating.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attention_modules import AttentionSwapError, swap_attention
from attention_modules.hosts import attention_layers
from attention_modules.sharing import SharedValueError
from tests.attention_modules.hosts.cases import FEATURES_APART, MECHANISMS, PADDING_ALONE

PAGE = Path(__file__).parents[4] / "docs/how_to/generating.md"
STEPS, TOLERANCE = 5, 1e-5
# What is passed to generate() for each column of the table, beside the prompt.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "left padding": {"padded": True},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "beams": {"num_beams": 2},
    "sliding window": {"window": 4},
    "sliding window, static cache": {"window": 4, "cache_implementation": "static", "disable_compile": True},
    "sliding and full layers": {"window": 4, "mixed": True},
}
# Those that rotary positions or causality keep out of the models that generate.
NAMES = tuple(name for name in MECHANISMS if name not in (*FEATURES_APART, *PADDING_ALONE))


def language_model(window: int | None = None, mixed: bool = False) -> nn.Module:
    """A tiny Llama, or a Mistral whose layers see ``window`` tokens; a Qwen2 whose first layer does where mixed."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {
        "vocab_size": 60,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    family, own = ("Llama", {}) if window is None else ("Mistral", {"sliding_window": window})
    if mixed:
        kinds = ["sliding_attention", "full_attention"]
        family, own = "Qwen2", {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
    config = getattr(transformers, f"{family}Config")(**sizes, **ids, num_key_value_heads=4, **own)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def swapped_model(name: str, window: int | None = None, mixed: bool = False) -> nn.Module:
    """A language model with the mechanism, whose weights are far from where they start."""
    model = language_model(window, mixed)
    kind, options = MECHANISMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some refuse a cache is what is tried here
        swap_attention(model, kind, **options)
    with torch.no_grad():
        for layer in attention_layers(model):
            for parameter in layer.module.mechanism.parameters():
                if not parameter.dtype.is_complex and parameter.dim() < 3:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def generated(model: nn.Module, padded: bool = False, **how: Any) -> tuple[Tensor, Tensor]:
    """The tokens ``[2, 9 + STEPS]`` and, where there are no beams, the logits of each new one."""
    prompt = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    if padded:
        mask[1, :4], prompt[1, :4] = 0, 0
    out = model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    return out.sequences, torch.stack(out.logits)


def difference(name: str, way: str) -> float | None:
    """The largest difference of a logit to generation without a cache, to the largest logit; None where it is refused.

    Raises:
        AssertionError: if other tokens are generated.
    """
    how = dict(WAYS[way])
    model = swapped_model(name, how.pop("window", None), how.pop("mixed", False))
    plain = {key: value for key, value in how.items() if key in ("padded", "num_beams")}
    try:
        tokens, logits = generated(model, use_cache=False, **plain)
    except (RuntimeError, ValueError) as error:
        # Prompts that are padded before have other positions; a state holds more than a window of tokens.
        if "counts columns" not in str(error) and not ("window" in WAYS[way] and "keeps a state" in str(error)):
            raise
        return None
    try:
        cached, of_cached = generated(model, **how)
    except (NotImplementedError, ValueError, SharedValueError) as error:
        if "use_cache=False" not in str(error):
            raise
        return None
    assert torch.equal(cached, tokens), f"{name}, {way}: {cached.tolist()} and not {tokens.tolist()}"
    return ((of_cached - logits).abs().max() / logits.abs().max()).item()


def table() -> str:
    """Which mechanisms generate with which cache, as a table of Markdown."""
    lines = [f"| mechanism | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for name in NAMES:
        try:
            found = [difference(name, way) for way in WAYS]
        except AttentionSwapError:
            continue
        marks = ["refused" if value is None else "✓" if value <= TOLERANCE else f"{value:.0e}" for value in found]
        lines.append(f"| `{name}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    start, end = "<!-- table -->\n", "<!-- end -->"
    head, rest = text.split(start)
    return f"{head}{start}{table()}\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
