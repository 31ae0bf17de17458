"""How attention entropy changes where a causal model reads its context in parts that do not see each other.

Parallel context encoding (Zhang et al., Attention Entropy is a Key Factor: An Analysis of Parallel Context Encoding
with Full-attention-based Pre-trained Language Models, 2024): each part of the context starts at position 0 and sees
itself alone. The tokens that follow see all parts, at the positions after the longest. Their entropy is that of the
weights by which they mix the values, in each layer, whatever its mechanism.

The model is a causal one of Hugging Face, or a checkpoint of a task that holds one: it must take a mask of four
dimensions and `position_ids`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attention_modules.analysis import attention_maps
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.inputs import add_arguments, described_weights, read_inputs
from lightning_tasks.analyses.made_by import MADE_BY, Recording
from lightning_tasks.analyses.subjects import choose_layers, load_subject, shortened
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import output_folder
from lightning_tasks.runs.safe_files import write_rows

TABLE, FIGURE = "parallel_context.csv", "parallel_context.png"


def split_context(context: int, rest: int, parts: int) -> tuple[Tensor, Tensor]:
    """Which tokens see which, and at which positions they are.

    Args:
        context: tokens of the context, a multiple of ``parts``.
        rest: tokens that follow, which see all of it.
        parts: how many see themselves alone.

    Returns:
        Boolean ``[N, N]`` and integer ``[N]``, of N = context + rest tokens.

    Example:
        >>> seen, positions = split_context(context=4, rest=1, parts=2)
        >>> positions.tolist()
        [0, 1, 0, 1, 2]
        >>> seen[2].tolist(), seen[4].all().item()
        ([False, False, True, False, False], True)
    """
    size = context // parts
    place = torch.arange(context + rest)
    part = (place // size).clamp(max=parts)
    positions = torch.where(place < context, place % size, size + place - context)
    seen = (part[:, None] == part) | (place[:, None] >= context)
    return seen & (place <= place[:, None]), positions


def entropies(
    model: nn.Module, tokens: Tensor, context: int, parts: int, layers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Mean entropy of the tokens after the context, in nats, ``[H]`` by name of the layer.

    Raises:
        ValueError: if a layer looks at tokens that the mask hides.
    """
    seen, positions = split_context(context, tokens.shape[1] - context, parts)
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    given = {
        "input_ids": tokens,
        "attention_mask": mask.expand(len(tokens), 1, -1, -1),
        "position_ids": positions.expand(len(tokens), -1),
    }
    found = {}
    for name, weights in attention_maps(model, given, layers).items():
        size = weights.abs()
        if bool((size * ~seen).any()):
            raise ValueError(f"layer {name!r} looks at tokens that a mask of four dimensions hides")
        size = size[:, :, context:]
        share = size / size.sum(-1, keepdim=True)
        found[name] = -torch.special.xlogy(share, share).sum(-1).mean((0, 2))
    return found


def draw(found: Mapping[int, Mapping[str, Tensor]]) -> Figure:
    """Mean entropy of a layer's heads, a line for each number of parts."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for parts, layers in found.items():
        values = [float(each.mean()) for each in layers.values()]
        axes.plot(values, marker="o", markersize=3, label="whole" if parts == 1 else f"{parts} parts")
    axes.set_xlabel("layer")
    axes.set_ylabel("attention entropy, nats")
    axes.legend(fontsize=8)
    return figure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap analyze parallel-context",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=10, help="sequences (default: %(default)s)")
    parser.add_argument("--context", type=int, default=96, help="tokens of the context (default: %(default)s)")
    parser.add_argument("--rest", type=int, default=32, help="tokens that follow it (default: %(default)s)")
    parser.add_argument(
        "--parts", default="1,2,4", help="numbers of parts, which divide --context (default: %(default)s)"
    )
    parser.add_argument("--output", required=True, type=Path, help=f"folder for {TABLE}, {FIGURE} and {MADE_BY}")
    parser.set_defaults(mechanism=None)
    return parser


def _numbers_of_parts(options: Any) -> list[int]:
    for name in ("samples", "context", "rest"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} must be at least 1, got {getattr(options, name)}")
    found = [int(text) if text.strip().isdecimal() else 0 for text in options.parts.split(",")]
    if any(parts < 1 or options.context % parts for parts in found):
        raise UsageError(f"--parts {options.parts}: each must be a number that divides --context {options.context}")
    return found


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze parallel-context` with these arguments.

    Raises:
        UsageError: numbers out of their range, or a model that is not causal or takes no such mask.
        ValueError: a model or data that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    recording = Recording("attnswap analyze parallel-context", arguments)
    numbers = _numbers_of_parts(options)
    subject = load_subject(options.model, options.random, options.seed, options.trust_checkpoint)
    inputs = read_inputs(options, subject, options.samples, options.context + options.rest)
    model: Any = subject.model
    model = model if hasattr(model, "config") else getattr(model, "model", model)
    names = [layer.name for layer in choose_layers(model, options.layers)]
    if two_way := [each.name for each in attention_layers(model) if each.name in names and not each.spec.is_causal]:
        raise UsageError(
            f"{options.model} ({type(model).__name__}) is no causal model: {two_way[0]!r} sees the tokens that follow. "
            "Give a causal one, as gpt2"
        )
    with output_folder(options.output):
        try:
            found = {parts: entropies(model, inputs.values, options.context, parts, names) for parts in numbers}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"{options.model} ({type(model).__name__}) is no causal model that takes a mask of four dimensions: "
                f"{shortened(error)}"
            ) from error
        rows = [
            {"parts": parts, "layer": layer, "head": head, "entropy": float(value)}
            for parts, layers in found.items()
            for layer, heads in layers.items()
            for head, value in enumerate(heads)
        ]
        write_rows(options.output / TABLE, list(rows[0]), rows)
        draw(found).savefig(options.output / FIGURE, dpi=110)
        recording.write(options.output, anew=True)
    print(f"{options.model} ({described_weights(options)}); {options.data}: {inputs.described}")
    for parts, layers in found.items():
        print(f"{parts} parts:", *(f"{float(heads.mean()):.3f}" for heads in layers.values()))
